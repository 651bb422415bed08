"""Victim rules: which running request gives way when the pool is short."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.errors import ConfigError
from engine.request import Request

VictimRule = Callable[[Sequence[Request]], Request]
"""Takes the running requests that may be evicted (never empty, oldest first), returns one of them."""


def youngest(candidates: Sequence[Request]) -> Request:
    """The latest arrival. Drains: the oldest running request is never a victim, so it finishes."""
    return max(candidates, key=lambda request: request.arrival)


VICTIM_RULES: dict[str, VictimRule] = {"youngest": youngest}


def victim_rule(name: str) -> VictimRule:
    """The rule of that name. Raises ConfigError."""
    try:
        return VICTIM_RULES[name]
    except KeyError:
        raise ConfigError(f"unknown victim rule {name!r}; known: {', '.join(VICTIM_RULES)}") from None
