"""The schedule alone: this project's scheduler with a runner that computes nothing. Exact counters, no text."""

from __future__ import annotations

from typing import Any

from batchbench.adapters.engine import (
    REPORTS,
    EngineAdapter,
    schedule_config,
    swap_preference,
    translated,
    with_choices,
)
from batchbench.errors import UsageError
from batchbench.protocol import EngineDescription, Text
from batchbench.scenario import EngineSettings
from engine.core import Engine
from engine.plan import NoRunner

_MAX_BLOCKS = 20_000_000  # two gigabytes of lists, and far more than any server has
_MEASURED = ("padded_tokens", "copy_s")  # what only a real forward can tell


class ScheduleEngineFactory:
    """Builds a schedule per pool; needs no model, no torch and no memory for K/V."""

    def __init__(self, settings: EngineSettings, *, audit: bool = False) -> None:
        self.settings, self.audit = settings, audit

    def __call__(self, pool_blocks: int, /, **choices: Any) -> ScheduleEngine:
        return ScheduleEngine(with_choices(self.settings, choices), pool_blocks, audit=self.audit)


class ScheduleEngine(EngineAdapter):
    """Counters are those of the real engine, event by event.

    With a prefix cache, unless texts that requests generate happen to continue each other's prompts, or drawn texts of
    equal prompts happen to be equal (they are taken to differ): only a model can tell.
    """

    def __init__(self, settings: EngineSettings, pool_blocks: int, *, audit: bool = False) -> None:
        config = schedule_config(settings, pool_blocks)
        self._settings = settings
        if (blocks := pool_blocks + config.swap_blocks) > _MAX_BLOCKS:
            raise UsageError(f"a schedule keeps a list of its blocks: {blocks} are more than {_MAX_BLOCKS}")
        # What `auto` would be is for torch to say: then a calibration of any device is believed.
        preference = swap_preference(settings, None if settings.device == "auto" else settings.device)
        with translated():
            engine = Engine(config, NoRunner(), with_audit=audit, prefers_swap=preference)
        super().__init__(engine, measures=False)

    def describe(self) -> EngineDescription:
        return EngineDescription(
            engine="schedule",
            model=self._settings.model.written,
            dtype=self._settings.dtype,
            device="none",
            computes_text=False,
            reports=tuple(name for name in REPORTS if name not in _MEASURED),
            **self.schedule(),
        )

    def take(self, request_id: str) -> Text:
        with translated():
            return Text(tuple(self.engine.take(request_id).token_ids))
