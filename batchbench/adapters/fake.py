"""A scripted engine and a clock that only it moves: the harness, tested without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from batchbench.errors import RequestRefused
from batchbench.protocol import EngineDescription, IterationOutcome, RequestSpec, Text, Until


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class ScriptedEngine:
    """Plays back outcomes, `step_s` seconds each, whatever is submitted.

    refuse: ids to turn away at the door.
    """

    def __init__(
        self,
        script: Sequence[IterationOutcome],
        texts: Mapping[str, Text],
        *,
        slots: int,
        pool_blocks: int,
        clock: FakeClock,
        step_s: Sequence[float] | None = None,
        refuse: Sequence[str] = (),
        numerics: Literal["exact", "fast"] | None = None,
    ) -> None:
        self._script, self._texts, self._clock, self._refuse = script, texts, clock, refuse
        self._step_s = step_s or [1.0] * len(script)
        self._description = EngineDescription(
            "scripted", "none", "none", "none", slots, block_size=1, pool_blocks=pool_blocks, numerics=numerics
        )
        self._played = 0
        self.submitted: list[tuple[int, str]] = []  # (iterations played by then, id)
        self.closed = False

    def describe(self) -> EngineDescription:
        return self._description

    def submit(self, request: RequestSpec) -> None:
        self.check(request)
        self.submitted.append((self._played, request.request_id))

    def check(self, request: RequestSpec) -> None:
        if request.request_id in self._refuse:
            raise RequestRefused(f"request {request.request_id!r}: does not fit {self._description.pool_blocks} blocks")

    def advance(self, until: Until) -> None:
        return None

    @property
    def has_work(self) -> bool:
        return self._played < len(self._script)

    def step(self) -> IterationOutcome:
        self._clock.now_s += self._step_s[self._played]
        self._played += 1
        return self._script[self._played - 1]

    def take(self, request_id: str) -> Text:
        return self._texts[request_id]

    def close(self) -> None:
        self.closed = True
