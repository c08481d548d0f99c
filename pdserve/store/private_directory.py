"""The directory of an embedded redis server: private to its owner, and removed in the end even if the owner is killed.

The owner holds a lock on the directory itself, which the kernel lets go when the owner ends, however it ends. Whoever
comes next removes the directories that nobody has locked. A process id in the name would not do: it may belong to
somebody else by now, or to a process of another container that shares the directory of temporary files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SOCKET_NAME: Final = "redis.sock"

_PREFIX: Final = "pdserve-redis-"
_SHORT: Final = "/tmp"  # noqa: S108 - made with mkdtemp there
_MAX_SOCKET_PATH: Final = 100
"""Bytes; the kernel's limit is 107."""


class PrivateDirectory:
    """A new directory, with a path short enough for a socket in it, until `remove`."""

    def __init__(self) -> None:
        """Make it, and remove those whose owners were killed."""
        for parent in {tempfile.gettempdir(), _SHORT}:
            _remove_abandoned(Path(parent))
        # Again if another process has taken the new directory for an abandoned one before it was locked.
        while True:
            self.path = _make()
            with contextlib.suppress(FileNotFoundError):
                self._lock = _open(self.path)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Remove it with all that is in it. Harmless when repeated."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _make() -> Path:
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(os.fsencode(path / SOCKET_NAME)) > _MAX_SOCKET_PATH:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_SHORT))
    return path


def _open(path: Path) -> int:
    """Not passed on to child processes, whose copy would keep the lock."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _remove_abandoned(parent: Path) -> None:
    try:
        paths = list(_ours(parent))
    except OSError:
        # It cannot be listed; what can be used all the same is found out by using it.
        return
    for path in paths:
        # Somebody else may be removing it as well, or its owner has locked it.
        with contextlib.suppress(OSError):
            lock = _open(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Where the kernel does not end a server with its owner, it may serve others still.
                if not _answers(path / SOCKET_NAME):
                    shutil.rmtree(path)
            finally:
                os.close(lock)


def _ours(parent: Path) -> Iterator[Path]:
    for entry in os.scandir(parent):
        with contextlib.suppress(FileNotFoundError):
            if entry.name.startswith(_PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                yield Path(entry.path)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A frozen server accepts connections all the same; the kernel does it.
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True
        except OSError:
            return False
    return True
