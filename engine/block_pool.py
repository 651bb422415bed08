"""Free lists of a pool, and blocks that are shared by content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

Content = tuple[int, tuple[int, ...]]
"""Serial of the block before, and the block's own tokens."""


class FreeList:
    """Numbers 0..size-1, lowest first when fresh, last given back first. Serves slots, and blocks of the swap pool."""

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
        free = self._free
        if not 1 <= count <= len(free):
            raise IndexError(f"{count} wanted, {len(free)} free")
        if count == 1:
            return [free.pop()]
        taken = free[: -count - 1 : -1]
        del free[-count:]
        return taken

    def give_back(self, numbers: Sequence[int]) -> None:
        """Take numbers back; the last one given is the first one handed out again."""
        self._free.extend(reversed(numbers))


class BlockCount:
    """How many blocks are free, where nobody asks which."""

    def __init__(self, size: int) -> None:
        self.size = self.left = size

    def __len__(self) -> int:
        return self.left

    def take(self, count: int) -> None:
        """The caller has checked that they are there."""
        if count > self.left:
            raise IndexError(f"{count} wanted, {self.left} free")
        self.left -= count

    def add(self, count: int) -> None:
        """Count them back."""
        self.left += count


class BlockPool:
    """Blocks with a count of owners; a free one keeps its known content until it is handed out again.

    Handed out is the block that was freed longest ago; of one request's blocks the last first, so that a chain is
    forgotten from its end. Content is known by its chain: the serial of the block before it, and its own tokens.
    Lookups compare the tokens themselves, so blocks whose hashes collide are not taken for each other.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.owners = [0] * size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))
        self._known: dict[Content, tuple[int, int]] = {}  # content -> (serial, block)
        self._content: dict[int, Content] = {}  # block -> content, of known blocks
        self._serials = 0

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def free(self) -> Sequence[int]:
        return list(self._free)

    def content(self, block: int) -> tuple[int, ...] | None:
        """Tokens of a block that can be found, or None."""
        known = self._content.get(block)
        return None if known is None else known[1]

    @property
    def contents(self) -> tuple[Mapping[Content, tuple[int, int]], Mapping[int, Content]]:
        """Both ways to what is known, for the audit: content -> (serial, block), and block -> content."""
        return self._known, self._content

    def is_free(self, block: int) -> bool:
        return not self.owners[block]

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks and forget what they held; the caller has checked that they are there."""
        if not 1 <= count <= len(self._free):
            raise IndexError(f"{count} wanted, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.owners[block] = 1
            if block in self._content:
                del self._known[self._content.pop(block)]
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Count one owner more of each."""
        for block in blocks:
            if not self.owners[block]:
                del self._free[block]
            self.owners[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Count one owner less of each; those without any are free."""
        for block in reversed(blocks):
            self.owners[block] -= 1
            if not self.owners[block]:
                self._free[block] = None

    def find(self, tokens: Sequence[int], block_size: int, limit: int) -> tuple[list[int], list[int]]:
        """(blocks, serials) of the longest known chain that begins `tokens` and ends within `limit` positions."""
        blocks: list[int] = []
        chain: list[int] = []
        for end in range(block_size, limit + 1, block_size):
            known = self._known.get((chain[-1] if chain else 0, tuple(tokens[end - block_size : end])))
            if known is None:
                break
            chain.append(known[0])
            blocks.append(known[1])
        return blocks, chain

    def learn(self, block: int, parent: int, tokens: Sequence[int]) -> int:
        """Make a full block's content known, unless an equal one is. Returns the serial of that content."""
        content = (parent, tuple(tokens))
        if content in self._known:
            return self._known[content][0]
        self._serials += 1
        self._known[content] = (self._serials, block)
        self._content[block] = content
        return self._serials
