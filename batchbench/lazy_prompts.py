"""Prompts whose length is known before their token ids are made."""

from __future__ import annotations

import random
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from typing import overload


class LazyPrompt(Sequence[int]):
    """Token ids that are made whenever they are read, and kept nowhere: a schedule never reads them."""

    __slots__ = ()

    @abstractmethod
    def ids(self) -> Sequence[int]:
        """All token ids."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self.ids()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class RandomPrompt(LazyPrompt):
    """`tokens` byte values, which are valid ids in any vocabulary: the same for one key on every machine."""

    __slots__ = ("key", "tokens")

    def __init__(self, key: str, tokens: int) -> None:
        self.key, self.tokens = key, tokens

    def __len__(self) -> int:
        return self.tokens

    def ids(self) -> Sequence[int]:
        return tuple(random.Random(self.key).randbytes(self.tokens))


class Packed(LazyPrompt):
    """Ids that are kept, in four bytes each."""

    __slots__ = ("packed",)

    def __init__(self, ids: Sequence[int]) -> None:
        self.packed = array("I", ids)

    def __len__(self) -> int:
        return len(self.packed)

    def ids(self) -> Sequence[int]:
        return tuple(self.packed)


class Repeated(LazyPrompt):
    """One token id again and again."""

    __slots__ = ("token", "tokens")

    def __init__(self, token: int, tokens: int) -> None:
        self.token, self.tokens = token, tokens

    def __len__(self) -> int:
        return self.tokens

    def ids(self) -> Sequence[int]:
        return (self.token,) * self.tokens


class Joined(LazyPrompt):
    """Parts one after the other."""

    __slots__ = ("parts", "tokens")

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self.parts, self.tokens = tuple(parts), sum(map(len, parts))

    def __len__(self) -> int:
        return self.tokens

    def ids(self) -> Sequence[int]:
        return tuple(token for part in self.parts for token in part)


class Stretch(LazyPrompt):
    """`tokens` of a text's ids, from `start` on, and from the text's first again when it runs out."""

    __slots__ = ("start", "text", "tokens")

    def __init__(self, text: Sequence[int], start: int, tokens: int) -> None:
        self.text, self.start, self.tokens = text, start % len(text), tokens

    def __len__(self) -> int:
        return self.tokens

    def ids(self) -> Sequence[int]:
        head = self.text[self.start : self.start + self.tokens]
        rounds, rest = divmod(self.tokens - len(head), len(self.text))
        return (*head, *tuple(self.text) * rounds, *self.text[:rest])
