"""Models that are frozen and strict, and the numbers beyond which a scenario is a slip of the finger."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Far beyond any real server, small enough that a slip of the finger is refused instead of filling memory.
MAX_REQUESTS = 1_000_000
Requests = Annotated[int, Field(ge=1, le=MAX_REQUESTS)]
MAX_TOKENS = 10_000_000
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Index = Annotated[int, Field(ge=0, le=2**31 - 1)]
MAX_PROMPT_TOKENS = 10_000_000_000  # of all requests together; they are made as they are read
MAX_TIME = 10**9  # seconds or iterations, of any arrival: thirty years
Rate = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]  # per second or per iteration
Duration = Annotated[float, Field(ge=1e-6, le=1e7, allow_inf_nan=False)]  # seconds or iterations


class Frozen(BaseModel):
    """A table of a scenario: no key but its own, no type but the declared one, no change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
