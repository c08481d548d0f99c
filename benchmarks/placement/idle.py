"""What idle workers cost the router: its CPU time per request, and while nothing happens, with few and with many."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import grpc

from benchmarks.front_door.child import Child
from pdserve.addresses import free_port
from pdserve.config import load_config
from pdserve.launch.plan import ProcessPlan
from pdserve.launch.process import ManagedProcess
from pdserve.rpc.v1 import common_pb2, inference_pb2_grpc
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.embedded import EmbeddedRedis

MODEL: Final = "smollm2-135m-instruct"
"""Only its tokenizer and its name are used."""
CLUSTER: Final = "benchmark"
PROMPT_TOKENS: Final = 512
WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSample:
    """The router with so many workers."""

    num_workers: int
    idle_cores: float
    """CPU seconds per second without requests."""
    request_s: float
    """CPU seconds per request, beyond what it spends on idle workers meanwhile."""


class IdleCluster:
    """Redis, a router as users run it, and fake workers, a process each. Running while the context is open."""

    def __init__(self) -> None:
        self._exits = ExitStack()
        self._num_asked = 0

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            store = exits.enter_context(EmbeddedRedis())
            settings = {"model": MODEL, "store_url": store.url, "cluster": CLUSTER}
            self._workers = exits.enter_context(Child("benchmarks.placement.workers", settings))
            address = f"127.0.0.1:{free_port('127.0.0.1:0', 'listen')}"
            self._router = _start_router(store.url, address)
            exits.callback(self._stop_router)
            channel = exits.enter_context(grpc.insecure_channel(address))
            self._cluster = inference_pb2_grpc.ClusterStub(channel)
            self._inference = inference_pb2_grpc.InferenceStub(channel)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.close()

    def sample(self, num_pairs: int, *, window_s: float, num_requests: int) -> IdleSample:
        """Add as many pairs as are missing, wait until the router has all, and measure."""
        have = self._num_ready() // 2
        total: int = self._workers.ask("add", pairs=num_pairs - have)["workers"]
        self._wait_until(lambda: self._num_ready() == total, f"the router has found {total} workers")
        self._ask(num_requests // 10)
        idle = self._rate(lambda: time.sleep(window_s))
        began, cpu_s = time.monotonic(), self._cpu_s()
        self._ask(num_requests)
        spent = self._cpu_s() - cpu_s - idle * (time.monotonic() - began)
        return IdleSample(num_workers=total, idle_cores=idle, request_s=spent / num_requests)

    def _rate(self, pass_time: Callable[[], None]) -> float:
        began, cpu_s = time.monotonic(), self._cpu_s()
        pass_time()
        return (self._cpu_s() - cpu_s) / (time.monotonic() - began)

    def _ask(self, num_requests: int) -> None:
        """One after the other, a new prompt and one token each."""
        for _ in range(num_requests):
            self._num_asked += 1
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=_prompt(self._num_asked)), stop=common_pb2.StopParams(max_tokens=1)
            )
            for _response in self._inference.Generate(request, timeout=WAIT_S):
                pass

    def _cpu_s(self) -> float:
        """CPU time of the router so far, all threads, work of the kernel for it included."""
        tasks = Path(f"/proc/{self._router.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def _num_ready(self) -> int:
        try:
            status = self._cluster.GetStatus(pb.GetStatusRequest(), timeout=5.0)
        except grpc.RpcError:
            return 0
        return sum(worker.state == "ready" for worker in status.workers)

    def _wait_until(self, check: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not check():
            if not self._router.running:
                raise RuntimeError(self._router.describe_end())
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {WAIT_S:g} s: {what}")
            time.sleep(0.05)

    def _stop_router(self) -> None:
        self._router.send_signal(signal.SIGTERM)
        if not self._router.wait(10.0):
            self._router.send_signal(signal.SIGKILL)
            self._router.wait(10.0)


def _prompt(number: int) -> Sequence[int]:
    """Shares nothing with others."""
    return [1000 + (number * 7919 + i * 31) % 40_000 for i in range(PROMPT_TOKENS)]


def _start_router(store_url: str, address: str) -> ManagedProcess:
    config = load_config(
        environ={},
        overrides={
            "cluster": CLUSTER,
            "model.path": MODEL,
            "store.url": store_url,
            "router.listen": address,
            "router.http_port": None,
            "log.format": "json",
        },
    )
    return ManagedProcess(ProcessPlan(name="router", command="router", config=config), None)
