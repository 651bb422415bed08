"""Good files, changed in a few places: reading them raises nothing but the errors that are meant for people."""

from __future__ import annotations

import shutil
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.sandbox import watched
from tests.fuzz.targets import TOKENS, Target

_PLACE = st.integers(0, 2**31 - 1)
_PAYLOAD = st.one_of(st.sampled_from(TOKENS), st.binary(min_size=1, max_size=8))
_EDIT = st.tuples(st.sampled_from(("replace", "insert", "delete", "double", "cut", "bit")), _PLACE, _PLACE, _PAYLOAD)


def edited(data: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    """The file with these changes, one after the other."""
    for kind, where, size, payload in edits:
        at = where % (len(data) + 1)
        end = at + size % 64
        if kind == "replace":
            data = data[:at] + payload + data[at + len(payload) :]
        elif kind == "insert":
            data = data[:at] + payload + data[at:]
        elif kind == "delete":
            data = data[:at] + data[end:]
        elif kind == "double":
            data = data[:end] + data[at:]
        elif kind == "cut":
            data = data[:at]
        elif at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << size % 8]) + data[at + 1 :]
    return data


def read(target: Target, folder: Path, data: bytes) -> None:
    """Read that file; whatever it raises but what it may, and all that reading must not do, is raised."""
    (folder / target.name).write_bytes(data)
    try:
        with watched():
            target.read(folder)
    except target.raises as error:
        if not str(error).strip():
            raise AssertionError("an error without a word") from error


def prepared(target: Target, folder: Path) -> Path:
    """A folder for the file, with what lies beside it."""
    place = folder / "here"
    if target.kept is None:
        place.mkdir()
    else:
        shutil.copytree(target.kept, place)
    return place


def fuzz(target: Target, folder: Path, number: int, examples: int) -> None:
    """So many changed files, chosen by that seed."""

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(target.seeds), st.lists(_EDIT, min_size=1, max_size=5))
    def run(data: bytes, edits: list[tuple[str, int, int, bytes]]) -> None:
        read(target, folder, edited(data, edits))

    run()
