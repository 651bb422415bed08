"""A short run of every fuzz target, and what longer ones have found. `make fuzz` takes a minute for each."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchbench.errors import ResultError
from batchbench.results import load_result
from batchbench.schema import TABLES, arrow_schema
from engine.errors import CheckpointError
from engine.gguf_file import open_gguf
from engine.gguf_tokenizer import gguf_tokenizer
from tests.fuzz.__main__ import main
from tests.fuzz.fuzzing import fuzz, prepared, read
from tests.fuzz.sandbox import Forbidden, watched
from tests.fuzz.targets import targets

ONE = (1).to_bytes(8, "little")  # length of a string in a GGUF file
NAMES = (
    "scenario", "lengths", "prompts", "prompts-toml", "calibration", "trace", "trace-parquet", "run.json",
    "run.json-v1", "safetensors", "config.json", "tokenizer.json", "gguf", "gguf-tokenizer", "rules", "status.json",
    "sweep.json", "repetition.json", "run.npz", "part-run.json", "part-iterations", "part-evictions",
    *(f"{name}.parquet" for name in TABLES),
)  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return targets(tmp_path_factory.mktemp("seeds"))


@pytest.fixture
def aimed(known, tmp_path, monkeypatch):
    """A target by name, and the folder that its file is in, with nothing else around."""

    def aim(name):
        place = prepared(known[name], tmp_path)
        monkeypatch.chdir(place)
        return known[name], place

    return aim


def test_every_target_is_run(known):
    assert tuple(known) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")  # of libraries, about what they read
def test_changed_files_are_read_or_refused(aimed, name):
    target, place = aimed(name)
    for data in target.seeds[:3]:
        read(target, place, data)  # good ones are read
    fuzz(target, place, number=34, examples=25)


@pytest.mark.parametrize(
    "name", ["rules", "status.json", "sweep.json", "repetition.json", "run.npz", "part-run.json", "part-iterations"]
)
def test_the_seeds_are_good(aimed, name):
    target, place = aimed(name)
    for data in target.seeds:
        (place / target.name).write_bytes(data)
        target.read(place)


# ---- the watch itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        (lambda folder: (folder / "made").write_text("x"), "is opened for writing"),
        (lambda folder: (folder / "made").mkdir(), "os.mkdir"),
        (lambda folder: __import__("decoy"), "decoy is imported"),
        (lambda folder: __import__("subprocess").run(["true"], check=True), "subprocess.Popen"),
        (lambda folder: __import__("pickle").loads(b"cos\nsystem\n."), "pickle.find_class"),
    ],
)
def test_what_reading_must_not_do_is_noticed(tmp_path, monkeypatch, deed, message):
    (tmp_path / "decoy.py").write_text("ran = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Forbidden, match=message), watched():
        deed(tmp_path)


# ---- found by longer runs --------------------------------------------------------------------------


def test_what_the_tokenizer_library_panics_at_is_a_damaged_checkpoint(known, tmp_path):
    """A panic is no Exception. Here: a merge whose sum the vocabulary lacks, and a control character in that."""
    data = known["gguf-tokenizer"].seeds[0]
    for old, new in (
        (b"\x02" + bytes(7) + b"ab", b"\x02" + bytes(7) + b"zz"),
        (b"g" + ONE + b"h", b"\x07" + ONE + b"h"),
    ):
        assert data.count(old) == 1
        data = data.replace(old, new)
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.gguf: damaged tokenizer: "):
        gguf_tokenizer(open_gguf(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"g" + ONE + b"h", b"\xe3" + ONE + b"h", "tokenizer.ggml.tokens is damaged: 'utf-8' codec"),
        (b"tokens\x09\x00\x00\x00\x08", b"tokens\x09\x00\x00\x00\x0a", "damaged"),
        (b"llama.block_count\x04", b"llama.block_count\x05", None),
    ],
)
def test_damaged_metadata_is_named(known, tmp_path, old, new, message):
    data = known["gguf-tokenizer"].seeds[0]
    assert data.count(old) == 1
    (tmp_path / "model.gguf").write_bytes(data.replace(old, new))
    if message is None:  # the same value as another integer type
        assert open_gguf(tmp_path / "model.gguf").config.layers == 1
        return
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{message}"):
        gguf_tokenizer(open_gguf(tmp_path / "model.gguf"))


def test_an_interval_that_is_not_there_is_damage(aimed):
    _, place = aimed("statistics.parquet")
    path = place / "statistics.parquet"
    table = pq.read_table(path)
    at = table.schema.get_field_index("n")
    twice = pa.array([2] * len(table), table.schema.field(at).type)
    pq.write_table(table.set_column(at, table.schema.field(at), twice), path)
    with pytest.raises(ResultError, match=r"statistics\.parquet has a low of one run, or none of several"):
        load_result(place)


@pytest.mark.parametrize("name", ["pools", "requests"])
def test_text_that_is_no_utf8_is_damage(aimed, name):
    """Parquet holds bytes and says that they are text; Arrow believes it until they are looked at."""
    _, place = aimed("pools.parquet")
    column, schema = {"pools": "text_digest", "requests": "request_id"}[name], arrow_schema(name)
    table = pq.read_table(place / f"{name}.parquet")
    values = [value.replace(b"r", b"\xe5").replace(b"0", b"\xe5") for value in table[column].cast("binary").to_pylist()]
    broken = pa.array(values, pa.binary()).view(pa.string())
    at = schema.get_field_index(column)
    pq.write_table(table.set_column(at, table.schema.field(at), broken), place / f"{name}.parquet")
    with pytest.raises(ResultError, match="damaged file"):
        load_result(place).rows(name)
    with pytest.raises(ResultError, match="damaged file"):
        load_result(place).point(name, 0)


# ---- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["5", "nope"], 2, "unknown target 'nope'; there are scenario, lengths, "),
        (["x"], 2, "argument seconds: invalid float value: 'x'"),
        (["0"], 2, "0 seconds: must be more than 0"),
        (["nan"], 2, "nan seconds: must be more than 0"),
        (["--help"], 0, "usage: python -m tests.fuzz"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_with_what_there_is(capsys, arguments, code, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == code and said in out + err
