"""Two routers, two workers of each kind and a redis server, each behind a wire of its own, any of which can be struck.

Whatever is struck is put right by `repair`: thawed, its wire mended, or started again under its name and address.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
import psutil
import redis

from pdserve.addresses import Reservation
from pdserve.client import NO_RETRIES, Client
from pdserve.config import load_config
from pdserve.errors import PdServeError
from pdserve.launch.plan import ProcessPlan
from pdserve.launch.process import ManagedProcess
from pdserve.launch.verify import num_keys_without_ttl
from pdserve.rpc.codec import stats_from_proto
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.rpc.v1 import worker_pb2, worker_pb2_grpc
from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.process_cluster import READY_TIMEOUT_S, wait_until
from pdserve.testing.wires import Weather, Wire, Wires
from pdserve.types import Role, WorkerStats

ROUTERS: Final = ("router-0", "router-1")
WORKERS: Final = {
    "prefill-0": Role.PREFILL,
    "prefill-1": Role.PREFILL,
    "decode-0": Role.DECODE,
    "decode-1": Role.DECODE,
}
REDIS: Final = "redis"

HEARTBEAT_S: Final = 0.5
PEER_TIMEOUT_S: Final = 4.0
"""A process that is silent for so long counts as frozen. The default of the product."""

_CALL_S: Final = 5.0
_BALLAST: Final = "ballast"
_DISK_BYTES: Final = 1 << 18
"""Enough for what redis logs, and not for what it is made to save."""
_STOP_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Line:
    """What a process has written."""

    at: float
    """`time.monotonic()` of its arrival here."""
    process: str
    text: str


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process takes of the machine."""

    rss_bytes: int
    num_fds: int
    num_threads: int


class ChaosCluster:
    """Use as a context manager, from the main thread: processes end with the thread that has started them."""

    def __init__(self, model: Path, **overrides: Any) -> None:
        """`overrides` as in ProcessCluster."""
        self.lines: list[Line] = []
        self.wires: dict[str, Wire] = {}
        """By process: what others reach it over."""
        self._weather = Wires()
        self._redis = EmbeddedRedis()
        self._overrides = {name.replace("__", "."): value for name, value in overrides.items()}
        self._model = model
        self._plans: dict[str, ProcessPlan] = {}
        self._processes: dict[str, ManagedProcess] = {}
        self._listens: dict[str, str] = {}
        self._clients: dict[str, Client] = {}
        self._frozen: set[str] = set()
        self._disk_is_full = False
        self._stack = ExitStack()

    @property
    def model(self) -> Path:
        """What it serves."""
        return self._model

    @property
    def addresses(self) -> list[str]:
        """Of the routers, over their wires."""
        return [self.wires[name].address for name in ROUTERS]

    def direct_address(self, router: str) -> str:
        """Of a router, past its wire."""
        return self._listens[router]

    def running(self, name: str) -> bool:
        """Whether the process has not ended."""
        return self._processes[name].running

    def pid_of(self, name: str) -> int:
        """Process id, of redis as well."""
        return self._redis.pid if name == REDIS else self._processes[name].pid

    # Faults.

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for the end."""
        os.kill(self.pid_of(name), signal.SIGKILL)
        if name != REDIS:
            self._processes[name].wait(_STOP_S)

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        os.kill(self.pid_of(name), signal.SIGSTOP)
        self._frozen.add(name)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self._frozen.discard(name)
        os.kill(self.pid_of(name), signal.SIGCONT)

    def thaw_all(self) -> None:
        """SIGCONT to all that are frozen."""
        for name in list(self._frozen):
            self.thaw(name)

    def weather(self, name: str, weather: Weather) -> None:
        """On the wire to a process."""
        self._weather.set(self.wires[name], weather)

    def fill_disk(self) -> None:
        """Redis cannot save any more, and therefore refuses to write (MISCONF)."""
        self._disk_is_full = True
        with self._redis_client() as client:
            client.set(_BALLAST, os.urandom(2 * _DISK_BYTES), ex=3600)
            self._limit_disk(_DISK_BYTES)
            client.execute_command("BGSAVE")
            wait_until(lambda: self._last_save(client) == "err", "redis has failed to save")

    def _empty_disk(self) -> None:
        self._disk_is_full = False
        self._limit_disk(resource.RLIM_INFINITY)
        with self._redis_client() as client:
            client.execute_command("BGSAVE")
            wait_until(lambda: self._last_save(client) == "ok", "redis has saved")
            client.delete(_BALLAST)

    def _limit_disk(self, num_bytes: int) -> None:
        """The longest file that redis may write."""
        resource.prlimit(self._redis.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    @staticmethod
    def _last_save(client: redis.Redis) -> str:
        return str(client.info("persistence")["rdb_last_bgsave_status"])

    def _redis_client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=self._redis.url.removeprefix("unix://"), decode_responses=True)

    # Repair.

    def start(self, name: str) -> None:
        """Start a process that has ended, at the address that it had."""
        if name == REDIS:
            self._redis.stop()
            self._start_redis()
            return
        self._processes[name] = ManagedProcess(
            self._plans[name], lambda who, text: self.lines.append(Line(time.monotonic(), who, text))
        )

    def repair(self) -> None:
        """Put everything right. What is started is ready a little later: `wait_ready`."""
        self._weather.clear_up()
        self.thaw_all()
        if self._disk_is_full:
            self._empty_disk()
        if not self._redis_runs():
            self.start(REDIS)
        for name in self._plans:
            if not self.running(name):
                self.start(name)

    def wait_ready(self) -> None:
        """Until all are ready and know each other."""
        try:
            wait_until(lambda: not self._missing(), "every router is ready and knows every worker", READY_TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; missing: {self._missing()}") from error

    def _redis_runs(self) -> bool:
        return psutil.pid_exists(self._redis_pid) and (psutil.Process(self._redis_pid).status() != psutil.STATUS_ZOMBIE)

    def _missing(self) -> list[str]:
        missing = []
        for router in ROUTERS:
            try:
                status = self._clients[router].status()
            except PdServeError as error:
                missing.append(f"{router}: {error.message}")
                continue
            ready = {w.info.worker_id for w in status.workers if w.state == "ready"}
            missing += [f"{router}: {worker}" for worker in WORKERS if worker not in ready]
            if not status.store_available:
                missing.append(f"{router}: redis")
        return missing

    # What is left.

    def assert_quiet(self, timeout_s: float = 30.0) -> None:
        """No request, block, child or key for ever anywhere."""
        try:
            wait_until(lambda: not self._busy(), "quiet", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"not quiet after {timeout_s:g} s: {'; '.join(self._busy())}") from error
        children = {name: psutil.Process(p.pid).children() for name, p in self._processes.items()}
        assert not any(children.values()), f"processes have children: {children}"
        assert num_keys_without_ttl(self._redis.url, self._cluster_name, timeout_s=10) == 0

    def _busy(self) -> list[str]:
        active = {router: self._clients[router].status().num_active_requests for router in ROUTERS}
        busy = [f"{router}: {num} requests" for router, num in active.items() if num]
        for name in WORKERS:
            s = self.stats(name)
            now = (s.blocks_in_use, s.num_waiting, s.num_running, s.num_transferring)
            if any(now):
                busy.append(f"{name}: %d blocks, %d waiting, %d running, %d in transfer" % now)
        return busy

    def stats(self, worker: str) -> WorkerStats:
        """By its own account."""
        with grpc.insecure_channel(self._listens[worker], options=list(CHANNEL_OPTIONS)) as channel:
            prefill = WORKERS[worker] is Role.PREFILL
            stub = worker_pb2_grpc.PrefillWorkerStub(channel) if prefill else worker_pb2_grpc.DecodeWorkerStub(channel)
            return stats_from_proto(stub.GetStats(worker_pb2.GetStatsRequest(), timeout=_CALL_S).stats)

    def footprints(self) -> dict[str, Footprint]:
        """Of every process but redis."""
        found = {}
        for name, managed in self._processes.items():
            process = psutil.Process(managed.pid)
            with process.oneshot():
                found[name] = Footprint(process.memory_info().rss, process.num_fds(), process.num_threads())
        return found

    def pids(self) -> dict[str, int]:
        """Of every process but redis: another one means that it was started again."""
        return {name: process.pid for name, process in self._processes.items()}

    # The whole.

    def _start_redis(self) -> None:
        self._redis.start()
        self._redis_pid = self._redis.pid
        with self._redis_client() as client:
            # Never by itself in a test; but only a server that saves refuses to write when it cannot.
            client.config_set("save", "86400 1000000")

    def _plan(self) -> None:
        settings: dict[str, Any] = {
            "model.path": str(self._model),
            "store.url": f"redis://{self.wires[REDIS].address}",
            "store.timeout_s": 1.0,
            "store.poll_s": 0.1,
            "kv.num_blocks": 2048,
            "health.heartbeat_s": HEARTBEAT_S,
            "health.peer_timeout_s": PEER_TIMEOUT_S,
            "engine.threads": 1,
            "engine.kind": "torch",
            # Prompts are computed by prefill workers: there is more to go wrong.
            "decode.local_prefill_tokens_per_step": 0,
            "router.max_attempts": 10,
            "router.worker_wait_s": 60.0,
            "router.http_port": None,
            "log.format": "json",
        } | self._overrides
        self._cluster_name = load_config(environ={}, overrides=settings).cluster
        for name in (*ROUTERS, *WORKERS):
            role = str(WORKERS[name]) if name in WORKERS else "router"
            own: dict[str, Any] = {f"{role}.listen": self._listens[name]}
            own |= (
                {f"{role}.worker_id": name, f"{role}.advertise": self.wires[name].address}
                if name in WORKERS
                else {f"{role}.router_id": name}
            )
            config = load_config(environ={}, overrides=settings | own)
            self._plans[name] = ProcessPlan(name=name, command=role, config=config)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._weather)
            stack.callback(self._redis.close)
            self._start_redis()
            self.wires[REDIS] = self._weather.add(self._redis.url.replace("unix://", "unix:"))
            for name in (*ROUTERS, *WORKERS):
                reservation = Reservation("127.0.0.1:0", f"{name}.listen")
                stack.callback(reservation.close)
                self._listens[name] = reservation.listen
                self.wires[name] = self._weather.add(reservation.listen)
            for router in ROUTERS:
                self._clients[router] = Client(self._listens[router], timeout_s=_CALL_S, retry=NO_RETRIES)
                stack.callback(self._clients[router].close)
            stack.callback(self._stop_all)
            self._plan()
            for name in self._plans:
                self.start(name)
            self.wait_ready()
            self._stack = stack.pop_all()
        return self

    def _stop_all(self) -> None:
        for group in (ROUTERS, tuple(WORKERS)):
            self._stop(group)

    def _stop(self, names: Sequence[str]) -> None:
        processes = [self._processes[name] for name in names if name in self._processes]
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        stuck = [process.name for process in processes if not process.wait(_STOP_S)]
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait(_STOP_S)
        assert not stuck, f"did not stop within {_STOP_S:g} s: {stuck}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
