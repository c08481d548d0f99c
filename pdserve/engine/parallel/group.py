"""The follower processes of a worker: start, watch, end. Lives in rank 0.

No follower outlives rank 0, however that ends: the kernel kills them with the thread that has started them, and they
see the end of their socket. And rank 0 learns within moments that a follower has ended, from the kernel as well; one
that lives and does not answer is found by the time-out of the next step. A group that has lost a rank is over: what
its other ranks hold is of no use, so they are killed, and the worker ends for its supervisor to start it again.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from pdserve.engine.engine import EngineLostError
from pdserve.engine.parallel.messages import (
    Array,
    Channel,
    ChannelClosedError,
    Kind,
    ProtocolError,
    from_json,
    pack,
    to_json,
)
from pdserve.errors import PdServeError, error_from_code
from pdserve.launch.parent import PARENT_PID_VARIABLE
from pdserve.shared_memory import SharedMemory

log = logging.getLogger(__name__)

FOLLOWER_MODULE: Final = "pdserve.engine.parallel.follower"
_EXIT_S = 3.0
"""How long a follower may take to end when it is no longer needed."""
_NOTICE_S = 1.0
"""After an error in a step: how long to wait for the kernel's word that a rank has ended, which says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerStart:
    """One follower to start."""

    settings: Mapping[str, Any]
    """What `Kind.START` brings it."""
    memory: SharedMemory | None
    """Where its KV pool lies; None on a GPU."""


@dataclass(frozen=True, slots=True)
class _Follower:
    rank: int
    channel: Channel
    store_channel: Channel
    process: subprocess.Popen[bytes]


class RankGroup:
    """Implements `Followers`. `tell` and `unison` are for the engine's thread; everything else is for any."""

    def __init__(self, starts: Sequence[FollowerStart], *, timeout_s: float) -> None:
        """Start the processes, of ranks 1 and up, which begin to load. `timeout_s`: see `PartSettings`.

        Raises EngineLostError if one cannot be started.
        """
        self._timeout_s = timeout_s
        self._reason: str | None = None
        self._is_over = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        self._on_lost: list[Callable[[str], None]] = []
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._followers: list[_Follower] = []
        self._failure: OSError | None = None
        started = threading.Event()
        # The kernel kills the followers when the thread ends that has started them: one that lives as long as they do.
        self._watcher = threading.Thread(target=self._watch, args=(starts, started), name="ranks", daemon=True)
        self._watcher.start()
        started.wait()
        try:
            if self._failure is not None:
                raise EngineLostError(f"a rank cannot be started: {self._failure}") from self._failure
            for follower, start in zip(self._followers, starts, strict=True):
                self._send(follower, pack(Kind.START, [from_json(dict(start.settings))]))
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Ranks, rank 0 included."""
        return len(self._followers) + 1

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the followers, by rank."""
        return tuple(follower.process.pid for follower in self._followers)

    def store_channel(self, rank: int) -> Channel:
        """To a `serve_store` in that rank, if its pool is on a GPU."""
        return self._followers[rank - 1].store_channel

    def await_ready(self) -> None:
        """Return when all have loaded their part. Raises what kept one from it, and EngineLostError if one ended."""
        for follower in self._followers:
            try:
                kind, arrays = follower.channel.receive()
            except (ChannelClosedError, OSError) as error:
                raise self._lost(f"rank {follower.rank} has ended while it loaded the model") from error
            if kind is Kind.FAILED:
                raise _failure(follower.rank, to_json(arrays[0]))
            if kind is not Kind.READY:
                raise ProtocolError(f"rank {follower.rank} says {kind.name} instead of READY")
            # From now on it reads what it is told at once, or has been stopped.
            follower.channel.set_timeout(self._timeout_s)

    def tell(self, kind: Kind, arrays: Sequence[Array] = ()) -> None:
        """See `Followers`."""
        message = pack(kind, arrays)
        for follower in self._followers:
            self._send(follower, message)

    @contextmanager
    def unison(self) -> Iterator[None]:
        """See `Followers`."""
        if self._reason is not None:
            raise EngineLostError(self._reason)
        try:
            yield
        except Exception as error:
            says = str(error).strip().partition("\n")[0] or type(error).__name__
            raise self._lost(f"a step failed in between: {says}") from error

    def on_lost(self, call: Callable[[str], None]) -> None:
        """Call with the reason, once, on any thread, when the group is lost; at once if it is."""
        with self._lock:
            if self._reason is None:
                self._on_lost.append(call)
                return
        call(self._reason)

    def close(self) -> None:
        """End the followers, by force if need be, and wait for that. Call once, and nothing after it."""
        with self._lock:
            self._closing = True
        for follower in self._followers:
            follower.channel.close()
            follower.store_channel.close()
        self._wake()
        self._watcher.join()
        # Only now: a byte to a descriptor that has been closed could go to whoever has got its number.
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _send(self, follower: _Follower, message: bytes) -> None:
        if self._reason is not None:
            raise EngineLostError(self._reason)
        try:
            follower.channel.send_packed(message)
        except (ChannelClosedError, OSError) as error:
            raise self._lost(f"rank {follower.rank} takes no messages any more") from error

    def _lost(self, otherwise: str) -> EngineLostError:
        """The group is: because a process has ended, if one has, and for what the caller knows otherwise."""
        if not self._is_over.wait(_NOTICE_S):
            self._lose(otherwise)
        return EngineLostError(self._reason or otherwise)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None or self._closing:
                return
            self._reason = reason
            calls, self._on_lost = self._on_lost, []
            self._wake()
        log.critical("a rank of the engine is lost: %s", reason, extra={"ranks": self.size})
        self._is_over.set()
        for call in calls:
            call(reason)

    def _wake(self) -> None:
        # A full pipe wakes as well.
        with suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")

    # The watcher's thread ---------------------------------------------------------------------------------------------

    def _watch(self, starts: Sequence[FollowerStart], started: threading.Event) -> None:
        try:
            for rank, start in enumerate(starts, start=1):
                self._followers.append(_start(rank, start))
        except OSError as error:
            self._failure = error
        finally:
            started.set()
        try:
            ended = self._wait_for_an_end()
        except OSError as error:
            ended = f"the ranks cannot be watched: {error}"
        if ended is not None:
            self._lose(ended)
        self._end_all()

    def _wait_for_an_end(self) -> str | None:
        """Which process has ended, and how; None when the group is over for another reason."""
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        watched: dict[int, _Follower] = {}
        try:
            for follower in self._followers:
                fd = os.pidfd_open(follower.process.pid)
                watched[fd] = follower
                poll.register(fd, select.POLLIN)
            while True:
                for fd, _ in poll.poll():
                    if fd == self._wake_reader:
                        if self._closing or self._reason is not None:
                            return None
                        os.read(fd, 1)
                    else:
                        return _how_it_ended(watched[fd])
        finally:
            for fd in watched:
                os.close(fd)

    def _end_all(self) -> None:
        """Give those that see the end of their socket a moment, unless the group is lost, and kill the rest."""
        deadline = time.monotonic() + (0.0 if self._reason is not None else _EXIT_S)
        for follower in self._followers:
            process = follower.process
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(rank: int, start: FollowerStart) -> _Follower:
    ours, theirs = socket.socketpair()
    store_ours, store_theirs = socket.socketpair()
    fds = [theirs.fileno(), store_theirs.fileno()]
    if start.memory is not None:
        fds.append(start.memory.descriptor(writable=True))
    try:
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", FOLLOWER_MODULE, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            env=os.environ | {PARENT_PID_VARIABLE: str(os.getpid())},
        )
    except OSError:
        ours.close()
        store_ours.close()
        raise
    finally:
        theirs.close()
        store_theirs.close()
        for fd in fds[2:]:
            os.close(fd)
    return _Follower(rank, Channel(ours), Channel(store_ours), process)


def _how_it_ended(follower: _Follower) -> str:
    code = follower.process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {follower.rank} (process {follower.process.pid}) {how}"


def _failure(rank: int, value: Mapping[str, Any]) -> PdServeError:
    """What a follower has reported of its start."""
    error = error_from_code(str(value.get("code")), f"rank {rank}: {value.get('message')}")
    error.field = value.get("field")
    return error
