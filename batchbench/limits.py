"""Models that are frozen and strict, and the numbers beyond which a scenario is a slip of the finger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

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


def _within(path: str) -> str:
    """A path from the working folder may not leave it, by `..` or by a link; where else it leads, an absolute one says.

    So a scenario that somebody else wrote reads what lies beside the work, or what it names in full.
    """
    if "\0" in path:
        raise ValueError("is no path: it holds a zero byte")
    if not os.path.isabs(path):
        try:
            inside = Path(path).resolve().is_relative_to(Path().resolve())
        except (OSError, RuntimeError):
            raise ValueError("is no path: its links lead in a circle") from None
        if not inside:
            raise ValueError("leads out of the working folder; write an absolute path if it should")
    return path


FilePath = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_within)]


class Frozen(BaseModel):
    """A table of a scenario: no key but its own, no type but the declared one, no change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
