"""A short run of every fuzz target, and what longer ones have found. `make fuzz` takes a minute for each."""

from __future__ import annotations

import pytest

from tests.fuzz.fuzzing import fuzz, prepared, read
from tests.fuzz.sandbox import Forbidden, watched
from tests.fuzz.targets import targets

NAMES = (
    "scenario", "lengths", "prompts", "prompts-toml", "calibration", "trace", "trace-parquet", "run.json",
    "run.json-v1", "safetensors", "config.json", "tokenizer.json", "gguf", "gguf-tokenizer", "pools.parquet",
    "requests.parquet", "evictions.parquet", "texts.parquet",
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
