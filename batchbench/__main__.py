"""The `batchbench` command and `python -m batchbench`."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


class _Terminated(BaseException):
    """SIGTERM: what is open is closed on the way out."""


def main() -> None:
    """Run the command line; what happens before or outside a command is one line too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)  # while modules are imported, some of which catch exceptions
    try:
        from batchbench.cli import app

        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _terminate)
        app()
    except KeyboardInterrupt:
        _say("interrupted")
        raise SystemExit(128 + signal.SIGINT) from None
    except _Terminated:
        _say("terminated")
        raise SystemExit(128 + signal.SIGTERM) from None
    except OSError as error:  # the help or the version, on a device that is full
        _say(f"error: output: {error.strerror}")
        raise SystemExit(1) from None


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing is open yet, so nothing is lost."""
    _say("interrupted" if number == signal.SIGINT else "terminated")
    os._exit(128 + number)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
