"""What adapters of this project's engine share: settings in, outcomes out, whatever runs the plans. Free of torch."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, cast

import engine.errors
import engine.stretch
from batchbench.calibration import load_calibration
from batchbench.errors import EngineFailed, RequestRefused, UsageError
from batchbench.lazy_prompts import Joined, Repeated
from batchbench.protocol import (
    Admission,
    Eviction,
    IterationBatch,
    IterationEvents,
    IterationOutcome,
    Prefill,
    RequestSpec,
    Text,
    Until,
)
from batchbench.scenario import EngineSettings
from engine.config import SchedulerConfig
from engine.core import Engine
from engine.motions import PrefersSwap
from engine.sampling import GREEDY, Sampling

_CHOICES = tuple(field.name for field in fields(SchedulerConfig) if field.name != "pool_blocks")
REPORTS = tuple(field.name for field in fields(IterationOutcome))


def schedule_config(settings: EngineSettings, pool_blocks: int) -> SchedulerConfig:
    """The schedule that a scenario declares, in a pool of that size. Raises UsageError for a contradiction."""
    with translated():
        return SchedulerConfig(pool_blocks=pool_blocks, **{name: getattr(settings, name) for name in _CHOICES})


def with_choices(settings: EngineSettings, choices: dict[str, Any]) -> EngineSettings:
    """The settings of one point of a sweep. A point that recomputes has no swap pool, unless it says so itself."""
    unused = {"swap_blocks": 0} if choices.get("reclaim") == "recompute" else {}
    return settings.model_copy(update=unused | choices)


def swap_preference(settings: EngineSettings, device: str | None) -> PrefersSwap | None:
    """With reclaim = "cheaper", which victims are swapped: as the calibration file says; else None.

    device: the engine's, None if it has none. Raises UsageError for a file that is damaged or of another engine.
    """
    if settings.reclaim != "cheaper":
        return None
    if settings.calibration is None:
        raise UsageError("reclaim = 'cheaper' needs calibration, a file that batchbench calibrate wrote")
    calibration = load_calibration(settings.calibration)
    calibration.require_fits(
        settings.calibration,
        model=settings.model.written,
        dtype=settings.dtype,
        block_size=settings.block_size,
        device=device,
    )
    return calibration.prefers_swap


class EngineAdapter:
    """This project's engine as the harness wants it. measures: whether there is a forward, which pads and copies."""

    def __init__(self, engine: Engine, *, measures: bool = True) -> None:
        self.engine, self._measures = engine, measures

    def schedule(self) -> dict[str, Any]:
        """The fields of EngineDescription that say what is decided, and how."""
        config = self.engine.config
        said = {name: getattr(config, name) for name in _CHOICES if name not in ("victim", "max_tokens")}
        return said | {"pool_blocks": config.pool_blocks, "victim": config.victim_name}

    def submit(self, request: RequestSpec) -> None:
        with translated():
            sampling = GREEDY if request.sampling is None else Sampling(**asdict(request.sampling))
            self.engine.submit(request.request_id, request.prompt, request.output_tokens, sampling, request.priority)

    def check(self, request: RequestSpec) -> None:
        prompt = Joined([Repeated(0, request.history_tokens), request.prompt])
        try:
            with translated():
                self.engine.check(request.request_id, prompt, request.output_tokens)
        except RequestRefused as refused:
            if request.line is None:
                raise
            name = f"request {request.request_id!r}"  # which the engine does not know by its line
            raise RequestRefused(str(refused).replace(name, f"{name} (trace line {request.line})", 1)) from refused

    def advance(self, until: Until) -> IterationBatch | None:
        with translated():
            stretch = self.engine.advance(engine.stretch.Until(until.left, until.cost, until.most, until.watched))
        if stretch is None:
            return None
        return IterationBatch(
            stretch.issued_tokens,
            stretch.collected_tokens,
            stretch.forward_tokens,
            stretch.running,
            stretch.waiting,
            stretch.free_blocks,
            stretch.unused_tokens,
            cast(list[IterationEvents], stretch.events),  # the same fields, by the same names
        )

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> IterationOutcome:
        with translated():
            step = self.engine.step()
        evicted = step.evicted
        return IterationOutcome(
            issued_tokens=step.issued_tokens,
            collected_tokens=step.collected_tokens,
            finished=tuple(step.finished),
            preempted=tuple([event.request_id for event in evicted]),
            forward_tokens=step.forward_tokens,
            recomputed_tokens=step.recomputed_tokens,
            rebuilt_tokens=step.rebuilt_tokens,
            padded_tokens=step.padded_tokens if self._measures else None,
            prefill_rows=step.prefill_rows,
            recovered_tokens=step.recovered_tokens,
            shared_tokens=step.shared_tokens,
            swapped_out_tokens=step.swapped_out_tokens,
            swapped_in_tokens=step.swapped_in_tokens,
            copy_s=step.copy_s if self._measures else None,
            prefills=cast(tuple[Prefill, ...], tuple(step.prefills)),  # the same fields, by the same names
            admissions=cast(tuple[Admission, ...], tuple(step.admitted)),
            evictions=cast(tuple[Eviction, ...], tuple(evicted)),
            running=step.running,
            waiting=step.waiting,
            free_blocks=step.free_blocks,
            began=tuple(step.began),
            paused=tuple(step.paused),
            unused_tokens=step.unused_tokens,
        )

    def take(self, request_id: str) -> Text:
        with translated():
            output = self.engine.take(request_id)
        return Text(tuple(output.token_ids), tuple(output.logit_gaps))

    def close(self) -> None:
        del self.engine  # the K/V pool is the only thing held


class _Translated:
    """The engine's errors as the harness's. One object serves all: it is entered several times for every request."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, engine.errors.RequestRefused):
            raise RequestRefused(str(error)) from error
        if isinstance(error, _OF_SETTINGS):
            raise UsageError(str(error)) from error
        if isinstance(error, engine.errors.EngineError | RuntimeError | MemoryError):  # torch raises RuntimeError
            raise EngineFailed(f"{type(error).__name__}: {error}") from error


_OF_SETTINGS = (engine.errors.ConfigError, engine.errors.CheckpointError, engine.errors.KernelsUnavailable)
_TRANSLATED = _Translated()


def translated() -> _Translated:
    """Within it, the engine's errors are the harness's."""
    return _TRANSLATED
