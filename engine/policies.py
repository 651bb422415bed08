"""Victim rules: which running request gives way when the pool is short.

Every one drains under every rule set: an eviction loses no token, and between two new tokens there can be only so many
evictions (the argument for each rule set is in docs/preemption.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engine.errors import ConfigError
from engine.request import Request

VictimRule = Callable[[Sequence[Request]], Request]
"""Takes the running requests that may be evicted (never empty, in the order they run), returns one of them."""


def youngest(candidates: Sequence[Request]) -> Request:
    """The latest arrival. The oldest running request is never a victim while another runs."""
    return max(candidates, key=lambda request: request.arrival)


def oldest(candidates: Sequence[Request]) -> Request:
    """The earliest arrival."""
    return min(candidates, key=lambda request: request.arrival)


def fewest_cached(candidates: Sequence[Request]) -> Request:
    """The one whose K/V is cheapest to rebuild; ties: the first name."""
    return min(candidates, key=lambda request: (request.num_computed, request.request_id))


def most_cached(candidates: Sequence[Request]) -> Request:
    """The one that frees most; ties: the first name."""
    return min(candidates, key=lambda request: (-request.num_computed, request.request_id))


def most_blocks_per_remaining_token(candidates: Sequence[Request]) -> Request:
    """The one that holds most blocks for the least work that is left; ties: the latest arrival."""

    def held(request: Request) -> tuple[float, int]:
        return request.capacity / (request.length_limit - request.num_tokens), request.arrival

    return max(candidates, key=held)


def priority(candidates: Sequence[Request]) -> Request:
    """The highest priority number (0 is served first); ties: the latest arrival."""
    return max(candidates, key=lambda request: (request.priority, request.arrival))


def fewest_output(candidates: Sequence[Request]) -> Request:
    """The fewest tokens generated; ties: the longest prompt, then the last in order (SGLang's retraction)."""
    by_output = sorted(candidates, key=lambda r: (r.prompt_tokens - r.num_tokens, r.prompt_tokens))
    return by_output[-1]


VICTIM_RULES: dict[str, VictimRule] = {
    "youngest": youngest,
    "oldest": oldest,
    "fewest-cached": fewest_cached,
    "most-cached": most_cached,
    "most-blocks-per-remaining-token": most_blocks_per_remaining_token,
    "priority": priority,
    "fewest-output": fewest_output,
}


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Whatever a user's own rule raises, as one error that names it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigError(f"victim rule {name!r}: {type(error).__name__}: {error}") from error


def victim_rule(name: str) -> VictimRule:
    """The rule of that name, or a user's own as `package.module:function`. Raises ConfigError."""
    if name in VICTIM_RULES:
        return VICTIM_RULES[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise ConfigError(f"unknown victim rule {name!r}; known: {', '.join(VICTIM_RULES)}, or package.module:function")
    with _named(name):
        rule = getattr(importlib.import_module(module), function)
    if not callable(rule):
        raise ConfigError(f"victim rule {name!r} is not a function")

    def checked(candidates: Sequence[Request]) -> Request:
        with _named(name):
            chosen: Request = rule(candidates)
        if not any(chosen is request for request in candidates):
            raise ConfigError(f"victim rule {name!r} returned {chosen!r}, which is none of its candidates")
        return chosen

    return checked
