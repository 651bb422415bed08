"""Text to token ids and back: whole, or token by token without ever giving out half a character."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.checkpoint import require_regular
from engine.errors import CheckpointError

Token = Callable[[int], str | None]  # the vocabulary's entry of an id, None where it has none

# The decoder of tokenizers converted from SentencePiece, Llama 2's and Mistral's; the last step may be missing.
_BYTE_FALLBACK = (
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"  # what undecodable bytes become


class Detokenizer(Protocol):
    """One request's text as it grows. All `push`es and the `flush` joined are `Tokenizer.decode` of all ids."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes. Takes time by the token, not by the text so far."""
        ...

    def flush(self) -> str:
        """What is left after the last token: replacement characters for bytes that no character owns, or nothing."""
        ...


class Tokenizer:
    """A tokenizer as the `tokenizers` library has it, byte-level or with byte fallback.

    Raises CheckpointError for one that decodes in another way, since its text could not be given out piecewise.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()  # settings of training, which would change a prompt silently
        inner.no_padding()
        self._inner = inner
        self._new = _detokenizer_of(inner.decoder, inner.id_to_token)

    def encode(self, text: str) -> list[int]:
        """Token ids, with those that the tokenizer puts around every text, such as Llama's first token.

        Special tokens in the text are recognised. What the vocabulary has no token for is left out, or becomes the
        unknown token, as the tokenizer's own rule has it.
        """
        return list(self._inner.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, special tokens included. Bytes that form no character become U+FFFD; unknown ids give nothing."""
        return self._inner.decode(list(token_ids), skip_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one request."""
        return self._new()


@contextmanager
def complaints(what: str) -> Iterator[None]:
    """What the library says against a file, as one CheckpointError: it raises nothing narrower than Exception, and what
    it did not foresee as a panic, which is no Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {' '.join(str(error).split())}") from None


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json. Raises CheckpointError if it is missing, damaged or of another kind."""
    path = folder / "tokenizer.json"
    require_regular(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no tokenizer.json, so text cannot become token ids; copy it from the model's original folder"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    with complaints(f"{path}: damaged, or not a tokenizer"):
        inner = tokenizers.Tokenizer.from_buffer(data)
    try:
        return Tokenizer(inner)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def byte_tokenizer() -> Tokenizer:
    """256 tokens, one per byte of UTF-8: the text of the embedded model."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=_BYTES, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner)


def _bytes_by_character() -> dict[str, int]:
    """GPT-2's visible stand-ins for bytes (Radford et al., 2019): printable Latin-1 is itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _bytes_by_character()


def _detokenizer_of(decoder: Any, token: Token) -> Callable[[], Detokenizer]:
    """What makes the detokenizers that agree with this decoder."""
    steps = None if decoder is None else json.loads(decoder.__getstate__())
    if steps is not None and steps["type"] == "ByteLevel":
        return lambda: _ByteLevel(token)
    if steps is not None and steps["type"] == "Sequence":
        listed = tuple(steps["decoders"])
        if listed in (_BYTE_FALLBACK, _BYTE_FALLBACK[:-1]):
            return lambda: _ByteFallback(token, strip=len(listed) == len(_BYTE_FALLBACK))
    kind = "none" if steps is None else steps["type"]
    raise CheckpointError(f"decoder {kind!r} is not supported; known: ByteLevel, and SentencePiece's with ByteFallback")


class _ByteLevel:
    """Every token is bytes; a character is out once its last byte is there."""

    def __init__(self, token: Token) -> None:
        self._token = token
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._token(token_id) or ""
        values = [_BYTES.get(char, -1) for char in token]
        # A token with a character that stands for no byte was added as text.
        return self._utf8.decode(token.encode() if -1 in values else bytes(values))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallback:
    """Tokens are text, or single bytes such as <0xE2>, whose run is decoded whole: one bad byte spoils it all.

    A run is therefore held back until a token of text ends it.
    """

    def __init__(self, token: Token, *, strip: bool) -> None:
        self._token, self._strip = token, strip  # strip: the text's first character is dropped if it is a space
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        token = self._token(token_id)
        if token is None:
            return ""
        if _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(token[3:5], 16))
            return ""
        return self._out(self._end_of_run() + token.replace("\u2581", " "))

    def flush(self) -> str:
        return self._out(self._end_of_run())

    def _end_of_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _out(self, text: str) -> str:
        if text and self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text
