"""Everything round the measurements: redis, fake workers, the router as users run it, clients; a process each."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import psutil
import redis

from benchmarks.front_door.child import Child
from pdserve.addresses import free_port
from pdserve.config import load_config
from pdserve.launch.plan import ProcessPlan
from pdserve.launch.process import ManagedProcess
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.store.embedded import EmbeddedRedis

MODEL = "smollm2-135m-instruct"
"""Only its tokenizer and its name are used."""
CLUSTER = "benchmark"
PROMPT_TOKENS = 200
WAIT_S = 30.0


class Stage:
    """Running while the context is open."""

    def __init__(self, *, max_active_requests: int) -> None:
        self._max_active_requests = max_active_requests
        self._exits = ExitStack()
        self._asked = 0
        """Commands of `redis_commands` itself."""

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            store = exits.enter_context(EmbeddedRedis())
            self._redis = redis.Redis(unix_socket_path=store.url.removeprefix("unix://"))
            exits.callback(self._redis.close)
            common = {"model": MODEL, "store_url": store.url, "cluster": CLUSTER}
            self.workers = exits.enter_context(Child("benchmarks.front_door.workers", common))
            addresses = self.workers.ask("addresses")
            self._router = self._start_router(store.url)
            exits.callback(self._stop_router)
            channel = exits.enter_context(grpc.insecure_channel(self._address))
            self._cluster = inference_pb2_grpc.ClusterStub(channel)
            self.wait_until(self._ready, "the router has found its workers")
            settings = {
                "model": MODEL, "address": self._address, "http_address": self._http_address,
                "prefill_address": addresses["p0"], "prompt_tokens": PROMPT_TOKENS,
            }  # fmt: skip
            self.clients = exits.enter_context(Child("benchmarks.front_door.clients", settings))
            self.clients.ask("count")
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.close()

    def router_cpu_s(self) -> float:
        """CPU time of the router so far, all threads, work of the kernel for it included."""
        total = 0
        for task in Path(f"/proc/{self._router.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def router_memory(self) -> int:
        """Resident bytes of the router."""
        return int(psutil.Process(self._router.pid).memory_info().rss)

    def redis_commands(self) -> int:
        """Commands that redis has taken, without those of this method."""
        self._asked += 1
        stats: Any = self._redis.info("stats")
        return int(stats["total_commands_processed"]) - self._asked

    def wait_quiet(self) -> None:
        """Until the router serves no request."""
        self.wait_until(lambda: self._status().num_active_requests == 0, "no request is active")

    def wait_until(self, check: Callable[[], bool], what: str) -> None:
        """Raises RuntimeError naming `what` if it takes too long, or the router has ended."""
        deadline = time.monotonic() + WAIT_S
        while not check():
            if not self._router.running:
                raise RuntimeError(self._router.describe_end())
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {WAIT_S:g} s: {what}")
            time.sleep(0.02)

    def _start_router(self, store_url: str) -> ManagedProcess:
        ports = [free_port("127.0.0.1:0", "listen") for _ in range(2)]
        self._address, self._http_address = (f"127.0.0.1:{port}" for port in ports)
        config = load_config(
            environ={},
            overrides={
                "cluster": CLUSTER,
                "model.path": MODEL,
                "store.url": store_url,
                "router.listen": self._address,
                "router.http_port": ports[1],
                "router.max_active_requests": self._max_active_requests,
                # What each request logs is part of what it costs.
                "log.format": "json",
            },
        )
        return ManagedProcess(ProcessPlan(name="router", command="router", config=config), None)

    def _stop_router(self) -> None:
        if not self._router.running:
            print(self._router.describe_end(), file=sys.stderr)
        self._router.send_signal(signal.SIGTERM)
        if not self._router.wait(10.0):
            print(self._router.describe_end(), file=sys.stderr)
            self._router.send_signal(signal.SIGKILL)
            self._router.wait(10.0)

    def _ready(self) -> bool:
        try:
            return sum(worker.state == "ready" for worker in self._status().workers) == 2
        except grpc.RpcError:
            return False

    def _status(self) -> pb.ClusterStatus:
        status: pb.ClusterStatus = self._cluster.GetStatus(pb.GetStatusRequest(), timeout=5.0)
        return status
