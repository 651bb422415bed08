"""The free list of a pool: numbered things that are free or owned, handed out and taken back."""

from __future__ import annotations

from collections.abc import Sequence


class FreeList:
    """Numbers 0..size-1, lowest first when fresh. Serves blocks and slots."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def free(self) -> Sequence[int]:
        return self._free

    def take(self, count: int) -> list[int]:
        """Hand out `count` numbers; the caller has checked that they are there."""
        if not 1 <= count <= len(self._free):
            raise IndexError(f"{count} wanted, {len(self._free)} free")
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        return taken

    def give_back(self, numbers: Sequence[int]) -> None:
        """Take numbers back; the last one given is the first one handed out again."""
        self._free.extend(reversed(numbers))
