"""Conversion of GGUF files: the folder says what the file says, bit for bit, or there is no folder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import CheckpointError
from engine.gguf_file import load_gguf, open_gguf
from engine.gguf_to_folder import _config_json, convert, narrowest_dtype
from engine.hf_folder import load_folder
from engine.tokenizer import load_tokenizer
from tests.engine.test_gguf import WRITTEN, build, write
from tests.engine.test_tokenizer import HARD_TEXTS, plain_bpe
from tests.helpers import CPU, assert_same_weights

# Sixteen tokens and three merges are a tokenizer; the models' other ids have no text.
TOKENS = [*"abcde12Ġ", "ab", "abc", "Ġab", "<|end|>", "<|user|>"]
TYPES = [gguf.TokenType.NORMAL] * 11 + [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED]
MERGES = ["a b", "ab c", "Ġ ab"]


def add_tokenizer(writer, kind="gpt2", cut="smollm", tokens=TOKENS, types=TYPES, merges=MERGES, bos=False):
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(bos)
    writer.add_eos_token_id(11)


def written(path, family="llama", **tokenizer):
    """A GGUF file of a small random model with a small tokenizer; transformers' model too."""
    reference = build(family)
    return write(path, reference, WRITTEN[family], more=lambda w: add_tokenizer(w, **tokenizer)), reference


@pytest.mark.parametrize("family", WRITTEN)
def test_the_folder_is_the_same_model_as_the_file(family, tmp_path):
    path, reference = written(tmp_path / "x.gguf", family)
    assert convert(path, tmp_path / "made/folder") == torch.float32
    assert {file.name for file in (tmp_path / "made").rglob("*")} == {
        "folder", "config.json", "model.safetensors", "tokenizer.json"
    }  # fmt: skip
    folder = load_folder(tmp_path / "made/folder", torch.float32, CPU)
    assert_same_weights(folder, load_gguf(path, torch.float32, CPU))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made/folder").state_dict()
    for name, want in reference.state_dict().items():
        assert torch.equal(theirs[name], want), name


def test_tensors_are_written_in_the_narrowest_type_that_holds_them_all(tmp_path):
    fine = torch.tensor([1.0, 1 + 2**-7])  # 8 significant bits
    assert narrowest_dtype([fine]) == torch.bfloat16
    assert narrowest_dtype([fine, torch.tensor([1 + 2**-10])]) == torch.float16
    assert narrowest_dtype([torch.tensor([1 + 2**-10]), torch.tensor([2.0**20])]) == torch.float32
    reference = build("llama")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16().float())
    path = write(tmp_path / "x.gguf", reference, "llama", more=add_tokenizer)
    assert convert(path, tmp_path / "folder") == torch.bfloat16
    assert json.loads((tmp_path / "folder/config.json").read_text())["dtype"] == "bfloat16"
    assert_same_weights(load_folder(tmp_path / "folder", torch.float32, CPU), load_gguf(path, torch.float32, CPU))


def test_the_tokenizer_knows_merges_digits_and_special_tokens(tmp_path):
    path, _ = written(tmp_path / "x.gguf")
    convert(path, tmp_path / "folder")
    tokenizer = load_tokenizer(tmp_path / "folder")
    ids = {token: number for number, token in enumerate(TOKENS)}
    for text, want in [
        ("abcd ab", ["abc", "d", "Ġab"]),
        ("ab12  1", ["ab", "1", "2", "Ġ", "Ġ", "1"]),
        ("ab<|end|>ab<|user|>", ["ab", "<|end|>", "ab", "<|user|>"]),
    ]:
        assert tokenizer.encode(text) == [ids[token] for token in want]
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            {"kind": "llama"},
            "tokenizer 'llama' with pre-tokenizer 'smollm' is not supported; known: 'gpt2' with 'smollm'",
        ),
        ({"cut": "llama-bpe"}, "tokenizer 'gpt2' with pre-tokenizer 'llama-bpe' is not supported"),
        ({"bos": True}, "tokenizer.ggml.add_bos_token is not supported"),
        ({"tokens": ["a", "a", *TOKENS[2:]]}, "damaged vocabulary: 13 tokens, 12 of them distinct, with 13 types"),
        ({"types": TYPES[1:]}, "damaged vocabulary: 13 tokens, 13 of them distinct, with 12 types"),
        ({"merges": ["a z"]}, "damaged tokenizer: "),
        ({"merges": ["az"]}, "damaged tokenizer: "),
    ],
)
def test_a_tokenizer_that_cannot_be_converted_is_named_and_nothing_is_written(tmp_path, tokenizer, message):
    path, _ = written(tmp_path / "x.gguf", **tokenizer)
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(path, tmp_path / "folder")
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    path, _ = written(tmp_path / "x.gguf")
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match="mine is there already; move it away"):
        convert(path, tmp_path / "mine")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="file: File exists"):
        convert(path, tmp_path / "file/folder")


def test_a_conversion_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    path, _ = written(tmp_path / "x.gguf")
    monkeypatch.setattr("engine.gguf_to_folder.save_file", full)
    with pytest.raises(CheckpointError, match="folder: No space left on device"):
        convert(path, tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [path]


def test_a_configuration_that_config_json_cannot_say_is_refused(tmp_path):
    path, _ = written(tmp_path / "x.gguf", "qwen2")
    file = open_gguf(path)
    windowed = replace(file, config=replace(file.config, sliding_window=9))
    with pytest.raises(CheckpointError, match="sliding_window is 9, which config.json of a qwen2 model cannot say"):
        _config_json(windowed)


def test_the_command_says_what_it_did_or_what_is_wrong(tmp_path):
    path, _ = written(tmp_path / "x.gguf")

    def command():
        arguments = [sys.executable, "-m", "engine.gguf_to_folder", str(path), str(tmp_path / "folder")]
        return subprocess.run(arguments, capture_output=True, text=True, check=False)

    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/folder: tensors in torch.float32")
    again = command()
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == f"error: {tmp_path}/folder is there already; move it away, or name another folder\n"


# ---- real weights ----------------------------------------------------------------------------


@pytest.mark.smollm2
def test_the_folder_of_smollm2_is_the_same_model_as_the_file(smollm2, smollm2_folder):
    folder, file = load_folder(smollm2_folder, torch.float32, CPU), load_gguf(smollm2, torch.float32, CPU)
    assert_same_weights(folder, file)


@pytest.mark.smollm2
def test_smollm2_is_tokenized_as_its_rules_say(smollm2, smollm2_folder):
    """Against byte-pair encoding written out plainly, over the file's own vocabulary and merges."""
    tokenizer, file = load_tokenizer(smollm2_folder), open_gguf(smollm2)
    plain = plain_bpe(file)
    for text in HARD_TEXTS:
        assert tokenizer.encode(text) == plain(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.smollm2
def test_smollm2_is_tokenized_as_transformers_does_where_it_knows_the_rule(smollm2, smollm2_folder):
    """transformers builds a tokenizer from GGUF too, but does not cut digits apart, which shows only where white
    space of more than a space, or a number that is no digit, stands before or within a number.
    """
    theirs, ours = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name), load_tokenizer(smollm2_folder)
    differ = [text for text in HARD_TEXTS if ours.encode(text) != theirs(text)["input_ids"]]
    assert differ == [text for text in HARD_TEXTS if text in WHERE_DIGITS_MATTER]
    assert len(WHERE_DIGITS_MATTER) < len(HARD_TEXTS) / 4
    again = AutoTokenizer.from_pretrained(smollm2_folder)  # from tokenizer.json, which says the rule
    assert all(ours.encode(text) == again(text)["input_ids"] for text in HARD_TEXTS)


WHERE_DIGITS_MATTER = (
    "a  123 4 x",
    "x\n  42",
    "tab\t\t7",
    "naïve café Ångström ﬁ ½ ² Ⅷ ٣٤٥ 一二三 １２３",
    "      8      spaces",
)
