"""A cluster of real processes for tests, the current numbers of its workers, and the check that nothing is left.

Numbers are asked of the workers themselves: what the router shows is as old as the last heartbeat.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import psutil

from pdserve.client import Client
from pdserve.client.access import Access
from pdserve.config import Config, load_config
from pdserve.errors import NotFoundError
from pdserve.launch.cluster import LocalCluster
from pdserve.launch.plan import ProcessPlan
from pdserve.launch.process import ManagedProcess
from pdserve.launch.verify import num_keys_without_ttl
from pdserve.rpc.codec import stats_from_proto
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.rpc.v1 import worker_pb2, worker_pb2_grpc
from pdserve.security.identity import PeerRole, server_name
from pdserve.security.internal import InternalTls
from pdserve.types import Role, WorkerStats
from pdserve.worker_info import WorkerInfo

READY_TIMEOUT_S = 90.0
"""For a process that loads torch on a machine that does other things as well."""
QUIET_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 90.0
"""Of every call of `client` that sets none itself: a hang becomes an error."""
TERMINAL = ("FINISHED", "CANCELLED", "FAILED")
"""States in which a request stays."""

_POLL_S = 0.02
_STOP_S = 15.0


def wait_until(check: Callable[[], bool], what: str, timeout_s: float = QUIET_TIMEOUT_S) -> None:
    """Return as soon as `check()` is true. Raises AssertionError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(_POLL_S)


class ProcessCluster:
    """Use as a context manager. Leaving it stops everything and checks that nothing is left; so does `assert_quiet`
    while it runs."""

    def __init__(self, model: Path | str, *, access: Access | None = None, **overrides: Any) -> None:
        """`access` is how to get into the router, if it asks for TLS or a key.

        `overrides` are settings, with two underscores for the dot: `kv__num_blocks=64`."""
        settings: dict[str, Any] = {
            "model.path": str(model),
            "router.listen": "127.0.0.1:0",
            "kv.num_blocks": 512,
            "health.heartbeat_s": 0.2,
            # Workers that start are found at once.
            "store.poll_s": 0.1,
            # A worker of a busy test machine is slow long before it is dead.
            "health.peer_timeout_s": 10.0,
            "engine.threads": 1,
            # Computes in float32 on the weights as they are, which is what tokens are compared with.
            "engine.kind": "torch",
            # Prompts are computed by prefill workers, unless a test is about something else.
            "decode.local_prefill_tokens_per_step": 0,
        }
        settings |= {name.replace("__", "."): value for name, value in overrides.items()}
        self.settings = settings
        self.config: Config = load_config(environ={}, overrides=settings)
        self._lines: list[tuple[str, str]] = []
        self.local = LocalCluster(self.config, sink=lambda name, line: self._lines.append((name, line)), access=access)
        self._added: dict[str, ManagedProcess] = {}
        self._client: Client | None = None
        self._pids: dict[str, int] = {}
        self._watched: set[psutil.Process] = set()

    @property
    def client(self) -> Client:
        """A client that all threads may share."""
        assert self._client is not None, "the cluster does not run"
        return self._client

    @property
    def address(self) -> str:
        """host:port of the router."""
        return self.local.address

    def lines(self, process: str) -> list[str]:
        """What the named process has written so far."""
        return [line for name, line in self._lines if name == process]

    def infos(self) -> dict[str, WorkerInfo]:
        """Workers that the router is connected to and that it may use, by id."""
        return {w.info.worker_id: w.info for w in self.client.status().workers if w.state == "ready"}

    def stats(self) -> dict[str, WorkerStats]:
        """What each connected worker is doing now, by its own account."""
        return {worker_id: self._stats_of(info) for worker_id, info in self.infos().items()}

    def stats_of(self, role: Role) -> list[WorkerStats]:
        """`stats` of the workers of one kind."""
        return [self._stats_of(info) for info in self.infos().values() if info.role is role]

    def _stats_of(self, info: WorkerInfo) -> WorkerStats:
        with self._worker_channel(info) as channel:
            stub = (
                worker_pb2_grpc.PrefillWorkerStub(channel)
                if info.role is Role.PREFILL
                else worker_pb2_grpc.DecodeWorkerStub(channel)
            )
            answer = stub.GetStats(worker_pb2.GetStatsRequest(), timeout=CALL_TIMEOUT_S)
        return stats_from_proto(answer.stats)

    def _worker_channel(self, info: WorkerInfo) -> grpc.Channel:
        tls = InternalTls.of(self.config, PeerRole.OPERATOR)
        if tls is None:
            return grpc.insecure_channel(info.address, options=list(CHANNEL_OPTIONS))
        name = server_name(self.config.cluster, info.role.value)
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name)]
        return grpc.secure_channel(info.address, tls.channel_credentials(), options=options)

    def assert_quiet(self, timeout_s: float = QUIET_TIMEOUT_S) -> None:
        """QUIET: nothing runs, waits or holds a block anywhere, and every key in redis has a TTL.

        From a coroutine call it in a thread.
        """
        busy: list[str] = []

        def is_quiet() -> bool:
            status = self.client.status()
            busy[:] = [f"router: {status.num_active_requests} requests"] if status.num_active_requests else []
            for worker_id, s in self.stats().items():
                now = (s.blocks_in_use, s.num_waiting, s.num_running, s.num_transferring)
                if any(now):
                    busy.append(f"{worker_id}: %d blocks, %d waiting, %d running, %d in transfer" % now)
            return not busy

        try:
            wait_until(is_quiet, "quiet", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"not quiet after {timeout_s:g} s: " + "; ".join(busy)) from error
        assert num_keys_without_ttl(self.local.redis_url, self.config.cluster, timeout_s=10) == 0

    def assert_alive(self) -> None:
        """Every process is the one that was started."""
        ended = [p.describe_end() for p in self.local.processes if not p.running and p.name in self._pids]
        assert ended == []
        now = {p.name: p.pid for p in self.local.processes if p.running}
        assert now == self._pids, f"started {self._pids}, running now {now}"

    def wait_terminal(self, request_ids: Iterable[str]) -> dict[str, str]:
        """State of each request once it is terminal, here and in redis; an id never admitted is left out."""
        states: dict[str, str] = {}
        for request_id in request_ids:

            def ended(request_id: str = request_id) -> bool:
                try:
                    states[request_id] = self.client.get_request(request_id).state
                except NotFoundError:
                    return True
                return states[request_id] in TERMINAL

            wait_until(ended, f"{request_id} has ended, its record says {states.get(request_id)}")
        return states

    def add_worker(self, role: Role, name: str, **overrides: Any) -> None:
        """Start one more worker, which may differ in any setting, and wait until the router knows it."""
        settings = self.settings | {k.replace("__", "."): v for k, v in overrides.items()}
        settings |= {"store.url": self.local.redis_url, f"{role}.worker_id": name, "log.format": "json"}
        plan = ProcessPlan(name=name, command=str(role), config=load_config(environ={}, overrides=settings))
        self._added[name] = process = ManagedProcess(plan, lambda who, line: self._lines.append((who, line)))

        def known() -> bool:
            assert process.running, process.describe_end()
            states = {w.info.worker_id: w.state for w in self.client.status().workers}
            return states.get(name) not in (None, "connecting")

        wait_until(known, f"{name} is connected", READY_TIMEOUT_S)

    def kill_worker(self, name: str) -> None:
        """SIGKILL a worker for good and wait until the router no longer uses it."""
        if name in self._added:
            self._added[name].send_signal(signal.SIGKILL)
            self._added[name].wait(_STOP_S)
        else:
            self.local.kill(name)
            self._pids.pop(name)
        wait_until(lambda: name not in self.infos(), f"the router has noticed that {name} is gone")

    def _watch_processes(self) -> None:
        """Remember the processes that came later: they, too, must have ended when the cluster has."""
        own = [*self.local.processes, *self._added.values()]
        for parent in [psutil.Process(p.pid) for p in own if p.running]:
            self._watched |= {parent, *parent.children(recursive=True)}

    def __enter__(self) -> Self:
        before = set(psutil.Process().children(recursive=True))
        self.local.start()
        # Nothing else starts meanwhile, so this includes the redis server.
        self._watched = set(psutil.Process().children(recursive=True)) - before
        self._pids = {p.name: p.pid for p in self.local.processes}
        self._client = self.local.connect(timeout_s=CALL_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.assert_quiet()
                self._watch_processes()
            self.client.close()
            for process in self._added.values():
                process.send_signal(signal.SIGTERM)
            for process in self._added.values():
                stopped = process.wait(_STOP_S)
                process.send_signal(signal.SIGKILL)
                assert stopped or kind is not None, f"{process.name} did not stop within {_STOP_S:g} s"
            killed = self.local.stop_processes()
            if kind is None:
                assert killed == [], f"had to be killed: {killed}"
                assert num_keys_without_ttl(self.local.redis_url, self.config.cluster, timeout_s=10) == 0
        finally:
            self.local.stop(hurry=_set_event())
        left = [p for p in self._watched if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert left == [] or kind is not None, f"still running: {left}"


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
