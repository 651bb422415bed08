"""`python -m tests.fuzz [SECONDS] [TARGET...]`: every target for so long, a minute if it is not said (`make fuzz`)."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from tests.fuzz.fuzzing import fuzz, prepared
from tests.fuzz.targets import targets

EXAMPLES = 200  # between two looks at the clock


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 if a target failed, 2 for arguments that mean nothing."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Changes good files, and reads them.")
    parser.add_argument("seconds", type=float, nargs="?", default=60.0, help="for each target; 60 if it is not said")
    parser.add_argument("target", nargs="*", help="only these, instead of all; an unknown one is answered by the list")
    asked = parser.parse_args(arguments)
    if not 0 < asked.seconds < float("inf"):
        parser.error(f"{asked.seconds:g} seconds: must be more than 0")
    warnings.simplefilter("ignore")
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        known = targets(Path(made))
        if unknown := [name for name in asked.target if name not in known]:
            parser.error(f"unknown target {unknown[0]!r}; there are {', '.join(known)}")
        os.chdir(made)
        for name, target in known.items():
            if asked.target and name not in asked.target:
                continue
            with tempfile.TemporaryDirectory() as folder:
                place, number, end = prepared(target, Path(folder)), time.time_ns(), time.monotonic() + asked.seconds
                first = number
                try:
                    while time.monotonic() < end:
                        fuzz(target, place, number, EXAMPLES)
                        number += 1
                except BaseException:
                    traceback.print_exc()
                    failed += 1
                print(f"{name}: about {(number - first) * EXAMPLES} files, seeds from {first}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
