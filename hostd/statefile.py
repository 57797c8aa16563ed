"""Small JSON files that one process of ours leaves for another: replaced atomically, and believed only when they are whole.

The directory is root's alone (tmpfiles), yet what is in it may be damaged: cut off by a full /run, restored from somewhere,
made by hand. Reading never waits and never raises.
"""

from __future__ import annotations

import json
import os
import stat

MOST_BYTES = 1 << 20


def read_json(path: str, most: int = MOST_BYTES) -> object:
    """What the file says; None when it is not there or damaged: not a regular file (a link is not followed), another
    user's, larger than `most` bytes, unreadable, no JSON."""
    data = read_bytes(path, most)
    if data is None:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def read_bytes(path: str, most: int = MOST_BYTES) -> bytes | None:
    """The content of such a file; None as in `read_json`."""
    try:
        # Not blocking: a fifo would wait for its writer (open(2)).
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError):
        return None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_size > most:
            return None
        data = b""
        while len(data) <= most and (part := os.read(fd, most + 1 - len(data))):
            data += part
        return data if len(data) <= most else None
    except OSError:
        return None
    finally:
        os.close(fd)


def write_json(path: str, value: object) -> None:
    """Replaces the file, readable for us alone. Raises OSError; nothing is left behind then."""
    temporary = f"{path}.{os.getpid()}.new"
    data = memoryview(json.dumps(value).encode())
    try:
        os.unlink(temporary)  # of one that was killed, with our pid
    except FileNotFoundError:
        pass
    # Exclusive: whatever came in between is neither followed nor waited for.
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        _replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass  # it went with the directory
        raise


def _replace(temporary: str, path: str) -> None:
    try:
        os.rename(temporary, path)
    except IsADirectoryError:
        os.rmdir(path)  # an empty one is nobody's; what is in another one is not ours to remove
        os.rename(temporary, path)
