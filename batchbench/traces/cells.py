"""One cell of a trace: a count of tokens, or a time in integer nanoseconds; read exactly or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from functools import lru_cache

MAX_TOKENS = 10_000_000  # of one prompt or output: what a scenario allows, far beyond any context window
UNITS_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
# A number without a unit, by its magnitude. In seconds 1e11 is the year 5138; in milliseconds it is 1973.
_MAGNITUDES = ((10**11, "s"), (10**14, "ms"), (10**17, "us"))
_MIN_NS, _MAX_NS = -(2**61), 2**62  # 1896 to 2116: a difference, and a request's time on top, fit 64 bits
_BEYOND = "before 1896 or after 2116"

THOUSANDS = "thousands separators"
FRACTION = "whole numbers written with a fraction"
NO_ZONE = "times without a zone, taken as UTC"

_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?\s?(Z|z|UTC|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)
_LONGEST = 64  # characters of a number or a date; more is neither
_EPOCH_DAY = date(1970, 1, 1).toordinal()


class RefusedCell(Exception):
    """The reason why a cell, a record or a row cannot be used; whoever knows file and line adds them."""


class Number(str):
    """A number's digits as the JSON text has them, which a float would round."""

    __slots__ = ()


def shown(value: object) -> str:
    """A value from a file for a message: short, nothing in it can drive a terminal."""
    text = str(value) if isinstance(value, Number) else repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def is_empty(value: object) -> bool:
    """Whether a cell says nothing: null, or no text."""
    return value is None or (isinstance(value, str) and not value.strip())


def read_count(value: object, what: str, note: Callable[[str], None]) -> int:
    """A count of tokens of a cell that is not empty. Raises RefusedCell: negative, no whole number, too large."""
    if type(value) is not int:
        value = _whole(value, what, note)
    if value < 0:
        raise RefusedCell(f"{what} is {value}, must not be negative")
    if value > MAX_TOKENS:
        raise RefusedCell(f"{what} is {shown(value)}, more than {MAX_TOKENS}")
    return value


def _whole(value: object, what: str, note: Callable[[str], None]) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _LONGEST:
        return int(value)
    number = _decimal(value, note)
    if number is None or number != number.to_integral_value():
        raise RefusedCell(f"{what} is {shown(value)}, must be a whole number")
    if not isinstance(value, str) or "." in value or "e" in value.lower():
        note(FRACTION)
    if abs(number) > 2**63:  # before it is written out: 1e999 has a thousand digits
        raise RefusedCell(f"{what} is {shown(value)}, " + ("must not be negative" if number < 0 else "too large"))
    return int(number)


def _decimal(value: object, note: Callable[[str], None]) -> Decimal | None:
    """The exact value of a number or its text; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        return None
    text = value.strip() if isinstance(value, str) else repr(value) if isinstance(value, float) else str(value)
    if len(text) > _LONGEST:
        return None
    if _THOUSANDS.fullmatch(text):
        note(THOUSANDS)
        text = text.replace(",", "")
    return Decimal(text) if _NUMBER.fullmatch(text) else None


class Clock:
    """Reads the times of one column; its unit is settled once and never changes within a file.

    unit: a key of UNITS_NS, "date" for dates alone, None to go by the first value: a date, or a number whose magnitude
    tells the unit (below 1e11 seconds, below 1e14 milliseconds, below 1e17 microseconds, above nanoseconds).
    """

    def __init__(self, unit: str | None) -> None:
        self.unit = unit

    def read(self, value: object, note: Callable[[str], None]) -> int:
        """Nanoseconds of a cell that is not empty. Raises RefusedCell."""
        scale = UNITS_NS.get(self.unit or "")
        if scale is not None and type(value) is int:
            return self._checked(value * scale, value)
        number = None if self.unit == "date" else _decimal(value, note)
        if number is None:
            dated = value if type(value) is tuple else _date_ns(value) if isinstance(value, str) else None
            if dated is None or self.unit not in (None, "date"):
                raise RefusedCell(f"time is {shown(value)}, {self._wanted()}")
            return self._dated(dated, value, note)
        if scale is None:
            self.unit = next((unit for limit, unit in _MAGNITUDES if abs(number) < limit), "ns")
            scale = UNITS_NS[self.unit]
            note(f"times without a unit, taken as {self.unit} by the first")
        if not _MIN_NS <= number * scale <= _MAX_NS:
            raise RefusedCell(f"time is {shown(value)} {self.unit}, {_BEYOND}")
        return int((number * scale).to_integral_value())

    def _dated(self, dated: tuple[int, bool], value: object, note: Callable[[str], None]) -> int:
        self.unit = "date"
        ns, zoned = dated
        if not zoned:
            note(NO_ZONE)
        return self._checked(ns, value)

    def _checked(self, ns: int, value: object) -> int:
        if not _MIN_NS <= ns <= _MAX_NS:
            raise RefusedCell(f"time is {shown(value)}, {_BEYOND}")
        return ns

    def _wanted(self) -> str:
        return {
            None: "neither a number nor a date",
            "date": "must be a date like 2024-05-10 00:00:00.009930+00:00",
        }.get(self.unit, f"must be a number ({self.unit})")


def _date_ns(text: str) -> tuple[int, bool] | None:
    """Nanoseconds since 1970 UTC of an ISO date and time, and whether it has a zone; None if it is none.

    From 0 to 9 digits of fraction, each exact.
    """
    text = text.strip()
    found = _DATE.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None:
        return None
    year, month, day, hour, minute, second, fraction, zone = found.groups()
    days = _days(int(year), int(month), int(day))
    hours, minutes, seconds = int(hour), int(minute), int(second or 0)
    if days is None or hours > 23 or minutes > 59 or seconds > 59:
        raise RefusedCell(f"time is {shown(text)}, which is no date of the calendar")
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds - _offset_s(zone, text)
    return whole * 1_000_000_000 + int((fraction or "").ljust(9, "0")), zone is not None


def _offset_s(zone: str | None, text: str) -> int:
    if zone is None or zone in ("Z", "z", "UTC"):
        return 0
    digits = zone[1:].replace(":", "").ljust(4, "0")
    hours, minutes = int(digits[:2]), int(digits[2:])
    if hours > 23 or minutes > 59:
        raise RefusedCell(f"time is {shown(text)}, which has no zone on earth")
    return (hours * 60 + minutes) * (60 if zone[0] == "+" else -60)


@lru_cache(maxsize=64)
def _days(year: int, month: int, day: int) -> int | None:
    try:
        return date(year, month, day).toordinal() - _EPOCH_DAY
    except ValueError:
        return None
