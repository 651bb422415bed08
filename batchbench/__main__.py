"""The `batchbench` command and `python -m batchbench`."""

import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

_SAID = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class _Stopped(BaseException):
    """A signal to stop: what is open is closed on the way out. No KeyboardInterrupt, which libraries catch."""

    def __init__(self, number: int) -> None:
        super().__init__(_SAID[signal.Signals(number)])
        self.exit_code = 128 + number


def main() -> None:
    """Run the command line; what happens before or outside a command is one line too."""
    _on_signals(_leave)  # while modules are imported, some of which catch every exception
    if isinstance(sys.stdout, TextIOWrapper):  # else closed by the caller
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another encoding gets escapes, not an error
    try:
        from batchbench.cli import app

        _on_signals(_stop)
        app()
    except _Stopped as error:
        _say(str(error))
        raise SystemExit(error.exit_code) from None
    except OSError as error:  # the help or the version, on a device that is full
        _say(f"error: output: {error.strerror}")
        raise SystemExit(1) from None
    finally:
        _on_signals(signal.SIG_IGN)  # it is ending


def _on_signals(handler: signal.Handlers | Callable[[int, FrameType | None], NoReturn]) -> None:
    for number in _SAID:
        signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing is open yet, so nothing is lost."""
    _say(_SAID[signal.Signals(number)])
    os._exit(128 + number)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stopped(number)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
