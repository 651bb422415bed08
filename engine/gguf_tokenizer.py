"""Builds a tokenizer from the vocabulary and merges that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.errors import CheckpointError
from engine.gguf_file import GgufFile
from engine.tokenizer import complaints

# How text is cut before the merges, by the file's `tokenizer.ggml.pre`. smollm: every character of Unicode's number
# categories alone, then GPT-2's expression on what lies between (llama.cpp's rule of that name; the published
# tokenizer.json of SmolLM2 says the same).
_CUTS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
}
_CONTROL, _USER_DEFINED = 3, 4  # token types that stand for themselves wherever a text has them


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The file's byte-level BPE. Raises CheckpointError for another kind, or for a vocabulary that does not hold."""
    kind, cut = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or cut not in _CUTS:
        known = ", ".join(repr(name) for name in _CUTS)
        raise CheckpointError(
            f"{file.path}: tokenizer {kind!r} with pre-tokenizer {cut!r} is not supported; known: 'gpt2' with {known}. "
            f"The model's Hugging Face folder has a tokenizer.json"
        )
    for option in ("add_bos_token", "add_eos_token"):
        if file.field(f"tokenizer.ggml.{option}", False):
            raise CheckpointError(f"{file.path}: tokenizer.ggml.{option} is not supported")
    tokens: Sequence[str] = _list(file, "tokenizer.ggml.tokens", str)
    types: Sequence[int] = _list(file, "tokenizer.ggml.token_type", int)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if not tokens or len(types) != len(tokens) or len(vocabulary) != len(tokens):
        raise CheckpointError(
            f"{file.path}: damaged vocabulary: {len(tokens)} tokens, {len(vocabulary)} of them distinct, "
            f"with {len(types)} types"
        )
    pairs = (merge.partition(" ") for merge in _list(file, "tokenizer.ggml.merges", str))
    merges = [(left, right) for left, _, right in pairs]
    with complaints(f"{file.path}: damaged tokenizer"):
        built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.pre_tokenizer = _CUTS[cut]()
    built.decoder = decoders.ByteLevel()
    for add, wanted in ((built.add_special_tokens, _CONTROL), (built.add_tokens, _USER_DEFINED)):
        add([AddedToken(token, normalized=False) for token, of in zip(tokens, types, strict=True) if of == wanted])
    return built


def _list(file: GgufFile, key: str, kind: type) -> Sequence[Any]:
    found = file.field(key, [])
    if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
        raise CheckpointError(f"{file.path}: {key} is damaged: no list of {kind.__name__}")
    return found
