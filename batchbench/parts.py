"""What a sweep has finished, on disk before the sweep is: points, repetitions, and the joined result on its way.

    RESULT/batchbench-parts/.made-by-batchbench   the folder is ours to delete
                            sweep.json            whose parts these are: what a resume must find the same
                            point-N/              a finished point; begun as .point-N
                            repetition-R-N.json   what repetition R measured at point N; from R = 1
                            joined/               the whole result; begun as .joined

Everything is complete when it has its name: it is written under another, synced, then renamed. So a process may end
anywhere. A `joined` whose files are not all in their place yet is finished by the next sweep; until then readers take
each file from where it is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchbench.errors import UsageError
from batchbench.saved_timing import readable

NAME = "batchbench-parts"
_MARK, _MANIFEST = ".made-by-batchbench", "sweep.json"


def located(folder: Path, files: Sequence[str]) -> dict[str, Path]:
    """Where each file of a result is: in its place, or still on its way there. Files that are nowhere are left out."""
    places = {file: (folder / NAME / "joined" / file, folder / file) for file in files}
    found = ((file, next((path for path in paths if path.is_file()), None)) for file, paths in places.items())
    return {file: path for file, path in found if path is not None}


def has_parts(folder: Path) -> bool:
    """Whether a sweep into it has begun and not ended."""
    return (folder / NAME / _MANIFEST).is_file()


class Parts:
    """The parts of the result that goes into a folder. Raises OSError where the system refuses."""

    def __init__(self, result: Path, files: Sequence[str]) -> None:
        self._result, self._files, self.folder = result, files, result / NAME
        self.joining = self.folder / ".joined"
        self._joined = self.folder / "joined"

    def manifest(self) -> dict[str, Any] | None:
        """What the sweep wrote of itself when it began; None if there are no parts. Raises UsageError, ResultError."""
        self._require_ours()
        path = self.folder / _MANIFEST
        if not path.is_file():
            return None
        with readable(path):
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError
        return found

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Forget what is there and start anew."""
        self.discard()
        self.folder.mkdir()
        (self.folder / _MARK).touch()
        _sync(self.folder)
        _sync(self._result)
        self._write(_MANIFEST, manifest)

    # ---- points --------------------------------------------------------------------------

    def point(self, place: int) -> Path:
        return self.folder / f"point-{place}"

    def begin_point(self, place: int) -> Path:
        """An empty folder for it."""
        folder = self.folder / f".point-{place}"
        shutil.rmtree(folder, ignore_errors=True)  # begun by a sweep that died
        folder.mkdir()
        return folder

    def finish_point(self, place: int) -> None:
        """All of it, or nothing."""
        begun = self.folder / f".point-{place}"
        _sync_all(begun)
        begun.rename(self.point(place))
        _sync(self.folder)

    def saved(self, points: int) -> int:
        """How many points are finished, from the first on."""
        return next((place for place in range(points) if not self.point(place).is_dir()), points)

    # ---- repetitions ---------------------------------------------------------------------

    def save_repetition(self, number: int, place: int, measured: Mapping[str, Any]) -> None:
        self._write(f"repetition-{number}-{place}.json", measured)

    def repetition(self, number: int, place: int) -> dict[str, Any] | None:
        """What was saved of it; None if it has not been. Raises ResultError."""
        path = self.folder / f"repetition-{number}-{place}.json"
        if not path.is_file():
            return None
        with readable(path):
            found = dict(json.loads(path.read_text(encoding="utf-8")))
            if any(not (value is None or type(value) in (int, float)) for value in found.values()):
                raise ValueError
        return found

    # ---- the joined result ---------------------------------------------------------------

    def begin_joining(self) -> Path:
        """An empty folder for its files."""
        shutil.rmtree(self.joining, ignore_errors=True)
        self.joining.mkdir()
        return self.joining

    def install(self) -> None:
        """Put the joined files into their places. From the first rename on the result is the new one, whole."""
        _sync_all(self.joining)
        self.joining.rename(self._joined)
        _sync(self.folder)
        self.finish_installing()

    def finish_installing(self) -> None:
        """The rest of `install`, of a process that ended in it; nothing otherwise."""
        self._require_ours()
        if not self._joined.is_dir():
            return
        for file in self._files:
            if (self._joined / file).is_file():
                os.replace(self._joined / file, self._result / file)
        _sync(self._result)
        self.discard()

    # ---- the whole folder ----------------------------------------------------------------

    def discard(self) -> None:
        """Delete it: first what says that there is something to resume, last what says that it is ours."""
        self._require_ours()
        if not self.folder.exists():
            return
        (self.folder / _MANIFEST).unlink(missing_ok=True)
        _sync(self.folder)
        for path in list(self.folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path.rename(self.folder / f".{path.name.lstrip('.')}"))  # half of it has no proper name
            elif path.name != _MARK:
                path.unlink()
        (self.folder / _MARK).unlink(missing_ok=True)
        self.folder.rmdir()

    def _require_ours(self) -> None:
        """Raise UsageError rather than touch what batchbench did not make."""
        folder, mark = self.folder, self.folder / _MARK
        if not folder.exists() and not folder.is_symlink():
            return
        ours = folder.is_dir() and not folder.is_symlink() and not mark.is_symlink()
        if not ours or not (mark.is_file() or not any(folder.iterdir())):  # it ended between making it and marking it
            raise UsageError(f"{folder} was not made by batchbench; move it away")

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        begun = self.folder / f".{name}"
        begun.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        _sync(begun)
        begun.rename(self.folder / name)
        _sync(self.folder)


def _sync_all(folder: Path) -> None:
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """On the disk, not only on its way there: what is renamed afterwards holds what it should after a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
