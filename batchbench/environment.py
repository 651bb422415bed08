"""Where a result came from: machine, versions, source revision."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_PACKAGES = ("kv-batchbench", "torch", "numpy", "pyarrow", "pandas", "tokenizers")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that a figure depends on; null if not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine() -> Mapping[str, str | int | None]:
    """System, processor, cores that this process may use, and memory in bytes. No host name."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes(),
    }


def load_average() -> float | None:
    """Processes that wanted to run, over the last minute; None if the system does not say."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def git_revision() -> Mapping[str, str | bool] | None:
    """Commit of the source that is running and whether it was modified; None for an installed package.

    Asks the repository of this file alone. A scenario's own repository is never asked: its
    configuration could name commands for git to run.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git("rev-parse", "HEAD")
    modified = bool(_git("status", "--porcelain", "--untracked-files=no"))
    return None if commit is None else {"commit": commit, "modified": modified}


def _git(*arguments: str) -> str | None:
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or None


def memory_bytes() -> int | None:
    """Physical memory of this machine; None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
