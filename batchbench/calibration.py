"""A calibration file: what this machine takes to recompute and to swap, measured; read, checked and interpolated."""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from batchbench.errors import ScenarioError, UsageError
from batchbench.text_files import read_text

_MAX_BYTES = 2**24  # of a file: far more than its ladders take
MAX_TOKENS = 1_000_000  # of a context that may be calibrated
FORMAT: Literal["batchbench-calibration"] = "batchbench-calibration"
VERSION: Literal[1] = 1

Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Ms = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Timing(_Frozen):
    """Median of several rounds, and half the distance between their quartiles, in milliseconds."""

    median_ms: Ms
    spread_ms: Ms


class ResumePoint(_Frozen):
    """A victim of `tokens` cached positions comes back: an iteration of the engine that forwards its whole context
    beside decoding rows, and one that decodes it beside the same rows.
    """

    tokens: Count
    resume: Timing
    decode: Timing

    @property
    def extra_ms(self) -> float:
        """What the resume adds to the iteration; 0 where the difference is lost in the noise."""
        return max(0.0, self.resume.median_ms - self.decode.median_ms)


class CopyPoint(_Frozen):
    """`blocks` whole blocks copied to the swap pool, and back."""

    blocks: Count
    out: Timing
    back: Timing

    @property
    def round_trip_ms(self) -> float:
        return self.out.median_ms + self.back.median_ms


class Calibration(_Frozen):
    """A machine's measured costs for one model. Sizes in positions, blocks and bytes; times in milliseconds.

    beside_rows: decoding rows beside the one that resumes. resumes, copies: ladders, the shortest first.
    machine: null where the system does not say.
    """

    format: Literal["batchbench-calibration"] = FORMAT
    version: Literal[1] = VERSION
    batchbench: str | None
    created: str
    model: str
    dtype: str
    device: str
    threads: Count
    numerics: str
    numerics_detail: str
    block_size: Count
    kv_bytes_per_token: Count
    machine: dict[str, str | int | None]
    beside_rows: Annotated[int, Field(ge=0)]
    rounds: Count
    resumes: Annotated[tuple[ResumePoint, ...], Field(min_length=1)]
    copies: Annotated[tuple[CopyPoint, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _ladders_rise(self) -> Calibration:
        for name, sizes in (("resumes", [p.tokens for p in self.resumes]), ("copies", [p.blocks for p in self.copies])):
            if any(small >= large for small, large in pairwise(sizes)):
                raise ValueError(f"{name} must rise, are {sizes}")
        return self

    @property
    def max_tokens(self) -> int:
        """The longest context that was measured; beyond it costs are extrapolated."""
        return min(self.resumes[-1].tokens, self.copies[-1].blocks * self.block_size)

    def recompute_ms(self, tokens: float) -> float:
        """Milliseconds that recomputing `tokens` cached positions adds to the iteration of the resume.

        Linear between the measured lengths, from 0 at 0; beyond the last with the slope of the upper half of the
        lengths, which is a lower bound because attention grows. Raises ValueError below 0.
        """
        return _interpolated(tokens, [(point.tokens, point.extra_ms) for point in self.resumes])

    def swap_ms(self, tokens: int) -> float:
        """Milliseconds to copy `tokens` positions out and back, in whole blocks; interpolated as recompute_ms."""
        return _interpolated(-(-tokens // self.block_size), [(p.blocks, p.round_trip_ms) for p in self.copies])

    def prefers_swap(self, tokens: int) -> bool:
        """Whether the round trip of a victim of that many cached positions takes less than recomputing them."""
        return self.swap_ms(tokens) < self.recompute_ms(tokens)

    def crossovers(self) -> list[int]:
        """The lengths, up to max_tokens, at which the choice differs from that of one position less."""
        # The copies' cost is constant within a block and the resumes' linear between rungs, so between two of these
        # places the choice changes once at most.
        ends = {0, self.max_tokens, *(point.tokens for point in self.resumes if point.tokens < self.max_tokens)}
        blocks = range(1, -(-self.max_tokens // self.block_size))
        places = sorted(ends | {n * self.block_size for n in blocks} | {n * self.block_size + 1 for n in blocks})
        found, before = [], False
        for low, high in pairwise(places):
            now = self.prefers_swap(high)
            if now != before:
                inside = range(low + 1, high + 1)
                found.append(inside[bisect_left(inside, True, key=lambda n: self.prefers_swap(n) == now)])
            before = now
        return found

    def link_bytes_per_s(self) -> tuple[float, float] | None:
        """Bandwidth out and back at the largest copy; None if it took no time that could be measured."""
        last = self.copies[-1]
        moved = last.blocks * self.block_size * self.kv_bytes_per_token
        if not (last.out.median_ms > 0 and last.back.median_ms > 0):
            return None
        return moved / last.out.median_ms * 1e3, moved / last.back.median_ms * 1e3

    def require_fits(self, path: object, *, model: str, dtype: str, block_size: int, device: str | None) -> None:
        """Raise UsageError if it was measured for something else than this engine. device: its kind, None: unknown."""
        for name, measured, wanted in (
            ("model", Path(self.model), Path(model)),
            ("dtype", self.dtype, dtype),
            ("block_size", self.block_size, block_size),
            ("device", _kind(self.device), _kind(self.device if device is None else device)),
        ):
            if measured != wanted:
                raise UsageError(
                    f"calibration {path} was measured with {name} {measured}, the engine has {wanted}; "
                    f"measure one for it with batchbench calibrate"
                )


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read and check a calibration file. Raises UsageError: one line, naming the file and what is wrong with it."""
    try:
        document = json.loads(read_text(path, _MAX_BYTES))
    except ScenarioError as error:
        raise UsageError(f"calibration {error}") from None
    except (ValueError, RecursionError) as error:  # of the parser, of the decoder, of an endless integer
        raise UsageError(f"calibration {path}: not valid JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"calibration {path} is no calibration file; batchbench calibrate writes one")
    if type(document.get("version")) is not int or document["version"] != VERSION:
        found = str(document.get("version"))
        raise UsageError(f"calibration {path} has version {found:.40}, this batchbench reads {VERSION}")
    try:
        return Calibration.model_validate_json(json.dumps(document))  # as JSON: its arrays are the models' tuples
    except (ValidationError, RecursionError) as error:
        raise UsageError(f"calibration {path}: damaged file: {_complaint(error)}") from None


def require_savable(path: Path, what: str = "calibration") -> None:
    """Raise UsageError, before the work, if a file could not be put there."""
    if path.is_dir():
        raise UsageError(f"{what} {path} is a folder; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror or error}") from None


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write it, whole or not at all. Raises UsageError if it cannot be written."""
    text = json.dumps(calibration.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UsageError(f"calibration {path}: {error.strerror or error}") from None


def ladder(largest: int, step: int) -> list[int]:
    """1, step, 2 x step, 4 x step, ... and `largest`: costs that bend are caught where they are small and large."""
    rungs, rung = {1, largest}, step
    while rung < largest:
        rungs.add(rung)
        rung *= 2
    return sorted(rungs)


def _interpolated(at: float, points: Sequence[tuple[int, float]]) -> float:
    if not at >= 0:
        raise ValueError(f"{at} positions, must not be negative")
    known = [(0, 0.0), *points]
    for (left, low), (right, high) in pairwise(known):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    # The last segment may be short and lost in noise, so the slope is that from the length nearest half the last.
    left, low = min(known[:-1], key=lambda point: abs(point[0] - right / 2))
    return high + max(0.0, (high - low) / (right - left)) * (at - right)


def _kind(device: str) -> str:
    """cuda:1 -> cuda."""
    return device.partition(":")[0]


def _complaint(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return (f"{place}: " if place else "") + first["msg"].removeprefix("Value error, ")
