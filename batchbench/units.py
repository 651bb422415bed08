"""Numbers for people: bytes and seconds, scaled for display only."""

from __future__ import annotations


def show_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def show_seconds(seconds: float) -> str:
    """0.0021 -> '2.1 ms'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def show_blocks(count: int) -> str:
    """1 -> '1 block'."""
    return show_count(count, "block")


def show_count(count: int, what: str) -> str:
    """2, 'core' -> '2 cores'."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def show_digits(value: float, sign: str = "") -> str:
    """Three digits, or all of a whole number's, never an exponent for a large one: 1870.4 -> '1,870'. sign: or '+'."""
    return f"{value:{sign},.0f}" if abs(value) >= 999.5 else f"{value:{sign}.3g}"


def show_small_seconds(seconds: float) -> str:
    """Three digits, however small: 4.22e-07 -> '422 ns', 0.00021 -> '210 us'."""
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
