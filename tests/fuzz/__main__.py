"""`python -m tests.fuzz [SECONDS] [TARGET...]`: every target for so long, a minute if it is not said (`make fuzz`)."""

from __future__ import annotations

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


def main() -> int:
    seconds, wanted = float(sys.argv[1]) if sys.argv[1:] else 60.0, sys.argv[2:]
    warnings.simplefilter("ignore")
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        for name, target in targets(Path(made)).items():
            if wanted and name not in wanted:
                continue
            with tempfile.TemporaryDirectory() as folder:
                place, number, end = prepared(target, Path(folder)), time.time_ns(), time.monotonic() + seconds
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
