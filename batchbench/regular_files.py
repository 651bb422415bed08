"""Opens a file that somebody named: a regular one, so that no pipe or device is waited for without end."""

from __future__ import annotations

import errno
import io
import os
import stat


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """The file, to be read as bytes. Raises OSError; of a pipe, a device, a socket or a folder, with words of its own.

    What is opened is what is looked at: asking its name first would leave time to put something else there.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe that nobody writes to opens at once
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
        return io.BufferedReader(io.FileIO(fd, "rb"))
    except BaseException:
        os.close(fd)
        raise
