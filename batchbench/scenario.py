"""Scenario files: TOML in, frozen and fully validated models out."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import ErrorDetails

from batchbench.errors import ScenarioError
from batchbench.limits import Frozen, Index, Tokens
from batchbench.paths import FOLDER, FilePath
from batchbench.protocol import Choices, WorkloadClock
from batchbench.text_files import read_text
from batchbench.workload_schema import TAGS, Workload

Slots = Annotated[int, Field(ge=1, le=65_536)]
BlockSize = Annotated[int, Field(ge=1, le=65_536)]
MAX_BLOCKS = 2**31 - 1
_MAX_BYTES = 2**26  # of a scenario file: a million explicit requests
Blocks = Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
Rules = Literal["batchbench", "vllm-v1", "sglang"]
Victim = Annotated[str, Field(min_length=1, max_length=200)]
Admission = Literal["incremental", "reserve-output", "reserve-max"]
Gate = Literal["full-prompt", "first-chunk"]
Reclaim = Literal["recompute", "swap", "cheaper"]
Batching = Literal["continuous", "static"]
_BLOCKS, _SIZE = "pool in blocks", "pool in bytes or relative"  # which of the two a value is meant to be
PoolSize = Annotated[
    Annotated[Blocks, Tag(_BLOCKS)]
    | Annotated[str, Field(pattern=r"^[0-9]{1,12}(\.[0-9]{1,6})?(x|B|[KMGT]i?B)$"), Tag(_SIZE)],
    Discriminator(lambda value: _SIZE if isinstance(value, str) else _BLOCKS),
]
_MEMBERS = TAGS | {_BLOCKS, _SIZE}  # of unions: pydantic's paths name them, a file does not


class EngineSettings(Frozen):
    """The engine, everything but its pool. Sizes in rows, positions and blocks."""

    model: FilePath = Field(
        FilePath("tiny"),
        description="Model to run: `tiny` (embedded), or the path of a Hugging Face folder or GGUF file, "
        "from the scenario's folder.",
    )
    slots: Slots = Field(description="Rows a forward can have: the most requests that run at once.")
    block_size: BlockSize = Field(16, description="Positions in a block of the KV pool.")
    watermark_blocks: Index = Field(0, description="Blocks that admission leaves free while others run.")
    rules: Rules = Field(
        "batchbench", description="Whose schedule (docs/preemption.md): this project's, vLLM's v1, or SGLang's."
    )
    victim: Victim | None = Field(
        None,
        description="Who gives way when the pool is short: `youngest`, `oldest`, `fewest-cached`, `most-cached`, "
        "`most-blocks-per-remaining-token`, `priority`, `fewest-output`; left out, the rules' own.",
    )
    token_budget: Tokens | None = Field(
        None, description="Positions that an iteration may compute: longer prompts go in chunks; no limit if left out."
    )
    admission: Admission = Field(
        "incremental",
        description="Positions whose blocks an admission buys: those of its tokens so far, of all its output too, or "
        "`max_tokens`.",
    )
    max_tokens: Tokens | None = Field(None, description="Positions that `reserve-max` reserves for each request.")
    admission_gate: Gate = Field(
        "full-prompt", description="Under `vllm-v1`: what must fit before a request is admitted."
    )
    reclaim: Reclaim = Field(
        "recompute",
        description="What becomes of a victim's K/V: dropped and computed again, copied out and back, or `cheaper`: "
        "whichever of the two takes less by the calibration.",
    )
    swap_blocks: Index = Field(0, description="Blocks of the host pool that `swap` and `cheaper` copy to.")
    calibration: FilePath | None = Field(
        None,
        description="With `cheaper`: path, from the scenario's folder, of the file of measured costs that "
        "`batchbench calibrate` wrote.",
    )
    prefix_cache: bool = Field(
        False, description="Full blocks of equal content at equal positions are shared, and found again by a resume."
    )
    batching: Batching = Field(
        "continuous", description="`static`: a group of requests runs to its last member before the next is admitted."
    )
    device: str = Field("auto", description="`auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:N`.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of weights and K/V.")
    seed: Index = Field(0, description="Seed of the embedded model's weights.")
    threads: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="Processor threads; the embedded model is too small to gain from more, a real one gains."
    )
    kernels: Literal["auto", "native", "triton", "torch"] = Field(
        "auto",
        description="What computes the model: `native` (C++ on the processor, built on first use), `triton` (on a CUDA "
        "device), `torch`, or `auto`: the one made for the device, and torch where that cannot be had.",
    )
    numerics: Literal["exact", "fast"] = Field(
        "exact",
        description="`exact`: a request's bits do not depend on its company. `fast`: no such promise, and texts may "
        "differ between pools.",
    )


class SweepPoint(Frozen):
    """What one point changes of the engine; what it leaves out is the scenario's."""

    pool: PoolSize | None = None
    slots: Slots | None = None
    block_size: BlockSize | None = None
    watermark_blocks: Index | None = None
    rules: Rules | None = None
    victim: Victim | None = None
    token_budget: Tokens | None = None
    admission: Admission | None = None
    max_tokens: Tokens | None = None
    admission_gate: Gate | None = None
    reclaim: Reclaim | None = None
    swap_blocks: Index | None = None
    prefix_cache: bool | None = None
    batching: Batching | None = None

    @property
    def choices(self) -> Choices:
        """What it gives, but for the pool, as (name, value)."""
        return tuple((name, value) for name, value in self if name != "pool" and value is not None)


class Sweep(Frozen):
    """What is varied: pools, and either lists of values whose product is run, or points that say what they change."""

    pools: tuple[PoolSize, ...] | None = Field(
        None,
        description='Pool sizes, run in this order for each of the other choices: in blocks, in bytes (`"512MiB"`), or '
        'relative to the demand (`"0.5x"`, where `1x` is the smallest pool from which up nothing is evicted).',
        min_length=1,
    )
    points: tuple[SweepPoint, ...] | None = Field(
        None,
        description="Tables of engine keys, and perhaps a `pool`: each is run with its own pool, or with every one of "
        "`pools`.",
        min_length=1,
    )
    slots: tuple[Slots, ...] | None = Field(None, description="Values of `engine.slots`.", min_length=1)
    block_size: tuple[BlockSize, ...] | None = Field(None, description="Of `engine.block_size`.", min_length=1)
    watermark_blocks: tuple[Index, ...] | None = Field(None, description="Of `engine.watermark_blocks`.", min_length=1)
    rules: tuple[Rules, ...] | None = Field(None, description="Of `engine.rules`.", min_length=1)
    victim: tuple[Victim, ...] | None = Field(None, description="Of `engine.victim`.", min_length=1)
    token_budget: tuple[Tokens, ...] | None = Field(None, description="Of `engine.token_budget`.", min_length=1)
    admission: tuple[Admission, ...] | None = Field(None, description="Of `engine.admission`.", min_length=1)
    admission_gate: tuple[Gate, ...] | None = Field(None, description="Of `engine.admission_gate`.", min_length=1)
    reclaim: tuple[Reclaim, ...] | None = Field(None, description="Of `engine.reclaim`.", min_length=1)
    swap_blocks: tuple[Index, ...] | None = Field(None, description="Of `engine.swap_blocks`.", min_length=1)
    prefix_cache: tuple[bool, ...] | None = Field(None, description="Of `engine.prefix_cache`.", min_length=1)
    batching: tuple[Batching, ...] | None = Field(None, description="Of `engine.batching`.", min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Sweep:
        axes = self._axes
        for name, values in {"pool": self.pools or (), **axes}.items():
            if repeated := [value for i, value in enumerate(values) if value in values[:i]]:
                raise ValueError(f"{name} {repeated[0]} is listed twice")
        if self.points is None:
            if self.pools is None:
                raise ValueError("pools is missing")
            return self
        if axes:
            raise ValueError(f"give either points or lists of values, not both: there is {next(iter(axes))}, too")
        homeless = [n for n, point in enumerate(self.points) if point.pool is None]
        if homeless and self.pools is None:
            raise ValueError(f"points.{homeless[0]} has no pool, and there are no pools")
        if self.pools is not None and not homeless:
            raise ValueError("every one of points has a pool of its own, so pools would do nothing")
        return self

    @property
    def _axes(self) -> dict[str, tuple[Any, ...]]:
        return {name: values for name, values in self if name not in ("pools", "points") and values is not None}

    @property
    def declared(self) -> list[tuple[int | str, Choices]]:
        """(pool as written, choices) of every point, in order: pools vary fastest."""
        if self.points is not None:
            return [
                (pool, point.choices)
                for point in self.points
                for pool in ((self.pools or ()) if point.pool is None else (point.pool,))
            ]
        axes = self._axes
        combinations = [tuple(zip(axes, values, strict=True)) for values in product(*axes.values())]
        return [(pool, choices) for choices in combinations for pool in self.pools or ()]


Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Virtual(Frozen):
    """The modelled time of an iteration: iteration_s + rows x row_s + (positions - rows) x position_s."""

    iteration_s: Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)] = Field(
        description="Seconds that every iteration takes."
    )
    row_s: Seconds = Field(0.0, description="Seconds for each row.")
    position_s: Seconds = Field(0.0, description="Seconds for each position beyond one a row: of prompts, of resumes.")


class Objectives(Frozen):
    """What a request must stay within to count as good; left out, whatever it takes."""

    ttft_s: Seconds | None = Field(None, description="Seconds to the first token.")
    tpot_s: Seconds | None = Field(None, description="Seconds per token after the first.")
    e2e_s: Seconds | None = Field(None, description="Seconds to the last token.")

    @model_validator(mode="after")
    def _some(self) -> Objectives:
        if self.ttft_s is self.tpot_s is self.e2e_s is None:
            raise ValueError("there is no objective: give ttft_s, tpot_s or e2e_s")
        return self


class Run(Frozen):
    """How often the sweep runs every point, and what one run may take."""

    warmup: Annotated[int, Field(ge=0, le=1_000)] = Field(
        0, description="Passes over all points that are run and thrown away before anything is measured."
    )
    repetitions: Annotated[int, Field(ge=1, le=1_000)] = Field(
        1, description="Passes that are measured: every point once, then every point again, and so on."
    )
    max_iterations: Annotated[int, Field(ge=1, le=2**53)] | None = Field(
        None, description="Iterations that one run at one point may take; with work left then, the sweep fails."
    )
    max_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        None, description="Real seconds that it may take, whatever the clock; looked at between iterations."
    )


class Scenario(Frozen):
    """A whole benchmark, declared."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(
        description="Names the result folder: letters, digits, dot, underscore, hyphen."
    )
    clock: WorkloadClock = Field(
        "iterations",
        description="What arrivals are counted in: `iterations`; `virtual`, seconds by the model in [virtual]; or "
        "`wall`, real seconds, by which counters may differ from run to run.",
    )
    virtual: Virtual | None = Field(None, description='What an iteration takes under `clock = "virtual"`.')
    slo: Objectives | None = Field(None, description="Objectives that goodput counts requests by.")
    run: Run = Run()
    engine: EngineSettings
    workload: Workload
    sweep: Sweep

    @model_validator(mode="after")
    def _clocked(self) -> Scenario:
        if self.clock == "virtual" and self.virtual is None:
            raise ValueError("clock = 'virtual' needs [virtual]: what an iteration takes")
        if self.clock != "virtual" and self.virtual is not None:
            raise ValueError(f"[virtual] would do nothing: clock is {self.clock!r}")
        return self

    @model_validator(mode="after")
    def _calibrated(self) -> Scenario:
        reclaims = {dict(choices).get("reclaim", self.engine.reclaim) for _, choices in self.sweep.declared}
        if "cheaper" in reclaims and self.engine.calibration is None:
            raise ValueError("reclaim = 'cheaper' needs engine.calibration, a file that batchbench calibrate wrote")
        if "cheaper" not in reclaims and self.engine.calibration is not None:
            raise ValueError(
                f"engine.calibration = {self.engine.calibration.written!r} would do nothing: nothing is 'cheaper'"
            )
        return self


def load_scenario(path: str | Path) -> Scenario:
    """Read and validate a scenario file. Raises ScenarioError: one line, naming the file and the key.

    Paths in it are from its own folder, and stay in it (paths.py).
    """
    try:
        data = tomllib.loads(read_text(path, _MAX_BYTES))
    except RecursionError:
        raise ScenarioError(f"{path}: not valid TOML: nested too deeply") from None
    except ValueError as error:  # of the parser, of an integer of thousands of digits
        raise ScenarioError(f"{path}: not valid TOML: {error}") from None
    try:
        return Scenario.model_validate(_tuples(data), context={FOLDER: Path(path).parent})
    except RecursionError:
        raise ScenarioError(f"{path}: nested too deeply") from None
    except ValidationError as error:
        raise ScenarioError(f"{path}: {_complaints(error.errors())}") from None


def _tuples(value: Any) -> Any:
    """TOML arrays as tuples: what the frozen, strict models take."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _complaints(errors: list[ErrorDetails]) -> str:
    """The first few errors as one line; those that only follow from another are left out."""
    places = [error["loc"] for error in errors]
    telling = [
        e for e in errors if not (e["type"] == "too_short" and any(p[: len(e["loc"])] == e["loc"] != p for p in places))
    ]
    more = f"; and {len(telling) - 3} more" if len(telling) > 3 else ""
    return "; ".join(_complaint(error) for error in telling[:3]) + more


def _complaint(error: ErrorDetails) -> str:
    path = _shown_path(error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        *parents, key = (str(part) for part in error["loc"])
        near = difflib.get_close_matches(key, _keys_at(parents), n=1, cutoff=0.0)
        return f"unknown key {path!r}" + (f", did you mean {_shown_path([*parents, near[0]])!r}?" if near else "")
    if kind == "missing":
        return f"{path} is missing"
    said = {
        "tuple_type": "must be an array",
        "model_type": "must be a table",
        "int_type": "must be an integer",
        "string_type": "must be a string",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "greater_than": f"must be above {context.get('gt')}",
        "greater_than_equal": f"must be at least {context.get('ge')}",
        "less_than_equal": f"must be at most {context.get('le')}",
        "too_short": "must not be empty",
        "too_long": f"must have {context.get('max_length')} entries",
        "literal_error": f"must be {context.get('expected')}",
        "string_pattern_mismatch": "must be up to 100 letters, digits, '.', '_' or '-', the first a letter or digit",
    }.get(kind, error["msg"].removeprefix("Value error, "))
    if _SIZE in error["loc"]:
        said = 'must be a number of blocks, bytes such as "512MiB", or relative to the demand such as "0.5x"'
    value = error["input"]
    if isinstance(value, int) and value.bit_length() > 400:  # Python will not print it
        said += ", got a number of hundreds of digits"
    elif isinstance(value, (int, float, str)):
        said += f", got {value!r:.120}"
    return f"{path}: {said}" if path else said


def _shown_path(places: Iterable[str | int]) -> str:
    """Keys with dots between, as the file has them: without the names of a union's members."""
    return ".".join(str(part) for part in places if part not in _MEMBERS)


def _keys_at(parents: Iterable[str]) -> list[str]:
    models: list[type[BaseModel]] = [Scenario]
    for parent in parents:
        if parent in _MEMBERS:
            models = [model for model in models if parent in _tags_of(model)]
        elif not parent.isdigit():  # the place in an array of tables
            models = list(_models_in(models[0].model_fields[parent].annotation))
    return list(models[0].model_fields)


def _tags_of(model: type[BaseModel]) -> list[str]:
    """What a union calls this member: by the only value that its key `dist` or `process` can have."""
    fields = [(name, model.model_fields[name].annotation) for name in ("dist", "process") if name in model.model_fields]
    return [f"{name} {get_args(annotation)[0]}" for name, annotation in fields]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
