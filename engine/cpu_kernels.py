"""Builds the C++ kernels of engine/cpu on first use, for this processor, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from engine.errors import KernelsUnavailable

_SOURCES = Path(__file__).parent / "cpu"
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
_COMPILERS = ("g++", "clang++", "c++")
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


@cache
def load_kernels() -> ctypes.CDLL:
    """The library, built if this processor and compiler have no build in the cache yet (about ten seconds).

    The compiler is $CXX or the first of g++, clang++ and c++ that is there; builds are kept under
    $XDG_CACHE_HOME/batchbench. Raises KernelsUnavailable saying why there is none.
    """
    library = build()
    try:
        return declare(ctypes.CDLL(str(library)))
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from None


def declare(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    kernels.bb_create.restype = _POINTER
    kernels.bb_create.argtypes = (_POINTER, _INT)
    kernels.bb_destroy.argtypes = (_POINTER,)
    kernels.bb_forward.argtypes = (_POINTER, _POINTER)
    kernels.bb_top_two.argtypes = (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER)
    kernels.bb_pack.argtypes = (_POINTER, _LONG, _LONG, _POINTER, _LONG, _INT)
    kernels.bb_unit.argtypes, kernels.bb_unit.restype = (_INT,), ctypes.c_char_p
    for name in ("bb_destroy", "bb_forward", "bb_top_two", "bb_pack"):
        getattr(kernels, name).restype = None
    return kernels


def build(extra_flags: tuple[str, ...] = (), folder: Path = _SOURCES) -> Path:
    """Path of the library built from the sources in `folder`. Raises KernelsUnavailable."""
    compiler = _compiler()
    flags = (*_FLAGS, "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native", *extra_flags)
    sources = sorted(folder.iterdir())
    key = hashlib.sha256()
    for part in (*flags, _run([compiler, "--version"]), _processor(), *(source.read_text() for source in sources)):
        key.update(part.encode() + b"\0")
    cache = _cache_folder()
    library = cache / f"kernels-{key.hexdigest()[:24]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / library.name
            _run([compiler, *flags, str(folder / "decoder.cpp"), "-o", str(built)])
            built.replace(library)  # whole or not at all, whoever else builds at the same time
    return library


def compiler_version() -> str:
    """The first line of what the compiler says of itself. Raises KernelsUnavailable."""
    return _run([_compiler(), "--version"]).splitlines()[0]


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    found = shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise KernelsUnavailable(
            f"no C++ compiler: {wanted or ', '.join(_COMPILERS)} not found; install g++ or set CXX"
        )
    return found


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]}: {error}") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise KernelsUnavailable(f"{command[0]} failed: {first.strip()}")
    return done.stdout


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _cache_folder() -> Path:
    """A folder that is this user's alone: what lies there will be executed."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchbench"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = home.stat()
    except OSError as error:
        raise KernelsUnavailable(f"cache folder {home}: {error.strerror or error}") from None
    if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
        raise KernelsUnavailable(f"cache folder {home}: not this user's alone; chmod go-w it, or set XDG_CACHE_HOME")
    return home
