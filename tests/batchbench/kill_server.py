"""A process that has imported everything, and forks sweeps that are killed: by the clock, or at their n-th change.

Reads a JSON object a line, {"arguments": [...], "after_s": S or null, "at_event": N or null}, and answers with one:
{"signal": that ended it or 0, "code": of its exit, "seconds": S, "events": in the file system under the folder,
"stderr": S}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


def run(arguments, at_event, folder, count_at):
    """A sweep in this process, which kills itself before its n-th event under the folder."""
    seen = 0

    def hook(event, details):
        nonlocal seen
        if event in EVENTS and isinstance(details[0], (str, Path)) and str(details[0]).startswith(folder):
            seen += 1
            if seen == at_event:
                os.kill(os.getpid(), signal.SIGKILL)
            os.pwrite(count_at, seen.to_bytes(8, "little"), 0)

    sys.addaudithook(hook)
    sys.argv = ["batchbench", *arguments]
    from batchbench.__main__ import main

    main()


def child(arguments, at_event, folder, count_at, said):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(said, 2)
    try:
        run(arguments, at_event, folder, count_at)
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 99
    else:
        code = 0
    sys.stderr.flush()
    os._exit(code)


def answer(asked):
    """Fork one sweep, kill it when it is time, and say what became of it."""
    folder = asked["arguments"][asked["arguments"].index("--out") + 1]
    with tempfile.TemporaryFile() as counter, tempfile.TemporaryFile() as said:
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child(asked["arguments"], asked.get("at_event"), folder, counter.fileno(), said.fileno())
        if asked.get("after_s") is not None:
            time.sleep(asked["after_s"])
            os.kill(pid, asked.get("by", signal.SIGKILL))  # a zombie, if it has ended
        status = os.waitpid(pid, 0)[1]
        counter.seek(0), said.seek(0)
        return {
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "seconds": time.monotonic() - began,
            "events": int.from_bytes(counter.read(), "little"),
            "stderr": said.read().decode(),
        }


if __name__ == "__main__":
    for name in ("batchbench.cli", "engine.core", "engine.decoders", "pyarrow.pandas_compat", "runpy"):
        import_module(name)  # what a sweep imports late
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
