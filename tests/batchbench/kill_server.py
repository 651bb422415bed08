"""A process that has imported everything, and forks sweeps to which something happens while they run.

Reads a JSON object a line and answers with one. Asked: "arguments" of the command line; "after_s", seconds after its
begin at which it gets the signal "by"; "at_event", which change of the output folder `trouble` comes before: "kill",
"vanish" (the folder is renamed, with .gone behind its name), "full" (no file can be written any more). Answered:
"signal" that ended it or 0, exit "code", "seconds", "events" in the file system under the folder, "stderr".
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


def kill(folder):
    os.kill(os.getpid(), signal.SIGKILL)


def vanish(folder):
    os.rename(folder, folder + ".gone")


def full(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


TROUBLES = {"kill": kill, "vanish": vanish, "full": full}


def watch(asked, counter):
    """Count the events under the folder, and bring the trouble before the one that was asked for."""
    folder = asked["arguments"][asked["arguments"].index("--out") + 1]
    seen = 0

    def hook(event, details):
        nonlocal seen
        if event in EVENTS and isinstance(details[0], (str, Path)) and f"{details[0]}/".startswith(f"{folder}/"):
            seen += 1
            counter[:8] = seen.to_bytes(8, "little")
            if seen == asked.get("at_event"):
                TROUBLES[asked.get("trouble", "kill")](folder)

    sys.addaudithook(hook)


def child(asked, counter, said):
    """The sweep, in this process; it does not return."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(said, 2)
    watch(asked, counter)
    sys.argv = ["batchbench", *asked["arguments"]]
    main, code = import_module("batchbench.__main__").main, 0
    counter[8] = 1  # it begins
    try:
        main()
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 99
    sys.stderr.flush()
    os._exit(code)


def answer(asked):
    """Fork one sweep, signal it when it is time, and say what became of it."""
    counter, (hears, says) = mmap.mmap(-1, 9), os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        child(asked, counter, says)
    os.close(says)
    if asked.get("after_s") is not None:
        while not counter[8]:
            time.sleep(0.001)
        time.sleep(asked["after_s"])
        os.kill(pid, asked.get("by", signal.SIGKILL))  # a zombie, if it has ended
    with open(hears, encoding="utf-8") as file:
        stderr = file.read()
    status = os.waitpid(pid, 0)[1]
    return {
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "seconds": time.monotonic() - began,
        "events": int.from_bytes(counter[:8], "little"),
        "stderr": stderr,
    }


if __name__ == "__main__":
    for name in ("batchbench.cli", "engine.core", "engine.decoders", "pyarrow.pandas_compat", "runpy"):
        import_module(name)  # what a sweep imports late
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
