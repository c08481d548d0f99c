"""Prefill and decode workers, and a router, as services in this process and event loop, over real gRPC; and the check
that nothing of them is left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from decode_worker.service import DecodeService
from pdserve.config import Config
from pdserve.store.keys import Keyspace
from pdserve.testing.leaks import redis_keys_without_ttl
from pdserve.testing.waiting import eventually
from pdserve.types import DecodeTarget
from pdserve.worker.model import EngineFactory
from prefill_worker.service import PrefillService
from router.service import RouterService

Worker = PrefillService | DecodeService


def test_config(redis_url: str, cluster: str, **sections: dict[str, object]) -> Config:
    """A configuration for workers in a test: free ports, short times, `sections` on top."""
    tree: dict[str, dict[str, object]] = {
        # Computes in float32 on the weights as they are, which is what tokens are compared with. On several threads,
        # which wait for each other in loops, small models are slower.
        "engine": {"kind": "torch", "threads": 1},
        "store": {"url": redis_url, "lease_ttl_s": 2.0, "poll_s": 0.05},
        "health": {"heartbeat_s": 0.2, "peer_timeout_s": 1.5},
        "prefill": {"drain_timeout_s": 5.0},
        # Prompts are computed by prefill workers, unless a test is about something else.
        "decode": {"drain_timeout_s": 5.0, "local_prefill_tokens_per_step": 0},
    }
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return Config.model_validate({"cluster": cluster, **tree})


test_config.__test__ = False  # type: ignore[attr-defined]  # pytest must not take it for a test


class InProcessCluster:
    """`async with` starts all workers and, at the end, stops them and checks that they left nothing behind."""

    def __init__(
        self,
        config: Config,
        *,
        prefill: int = 1,
        decode: int = 1,
        router: bool = False,
        prefill_engines: Sequence[EngineFactory] = (),
        decode_engines: Sequence[EngineFactory] = (),
    ) -> None:
        """Each worker loads the configured model, unless there is an engine factory for it. The router needs a real
        model for its tokenizer."""
        self._config = config
        self.prefill = [
            PrefillService(config, engine_factory=prefill_engines[i] if prefill_engines else None)
            for i in range(prefill)
        ]
        self.decode = [
            DecodeService(config, engine_factory=decode_engines[i] if decode_engines else None) for i in range(decode)
        ]
        self.router = RouterService(config) if router else None
        self._running: list[Worker] = []
        self._runs: dict[Worker, asyncio.Task[None]] = {}
        self._tasks_before: set[asyncio.Task[object]] = set()

    async def __aenter__(self) -> Self:
        self._tasks_before = asyncio.all_tasks()
        self._running = [*self.decode, *self.prefill]
        try:
            async with asyncio.TaskGroup() as group:
                for service in self._running:
                    group.create_task(service.start())
                if self.router is not None:
                    group.create_task(self.router.start())
        except BaseException:
            await self._stop_all()
            raise
        self._runs = {s: asyncio.create_task(s.run(), name=f"run-{s.host.worker_id}") for s in self._running}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.quiet()
        finally:
            await self._stop_all()
        if error is None:
            await self.assert_nothing_left()

    def target(self, index: int = 0) -> DecodeTarget:
        """A decode worker as the destination of a hand-off."""
        return self.decode[index].host.info.target

    async def kill(self, service: Worker) -> None:
        """Let a worker go without a word to anybody, as nearly as one can in one process."""
        await service.host.endpoint.stop(0)
        await self._stop(service)

    def forget(self, service: Worker) -> None:
        """The test has stopped this worker itself."""
        self._running.remove(service)
        self._runs.pop(service).cancel()

    def run_of(self, service: Worker) -> asyncio.Task[None]:
        """The service's `run`, which ends only if the service cannot go on."""
        return self._runs[service]

    def blocks_in_use(self) -> int:
        """Blocks held on all workers that run."""
        return sum(worker.stats().blocks_in_use for worker in self._running)

    async def quiet(self, timeout_s: float = 5.0) -> None:
        """Wait until no worker holds a block or a request: QUIET."""
        await eventually(lambda: self.blocks_in_use() == 0, "all blocks are free", timeout_s)
        for worker in self._running:
            stats = worker.stats()
            left = (stats.num_waiting, stats.num_running, stats.num_transferring)
            assert left == (0, 0, 0), f"{worker.host.worker_id} has no blocks but {left}"
            worker.check_integrity()

    async def assert_nothing_left(self) -> None:
        """No task of ours, and no redis key that would stay."""

        def strays() -> set[asyncio.Task[object]]:
            return {t for t in asyncio.all_tasks() - self._tasks_before if t is not asyncio.current_task()}

        await eventually(lambda: not strays(), f"no task is left of {strays()}")
        keys = await redis_keys_without_ttl(self._config.store.url, Keyspace(self._config.cluster).prefix)
        assert keys == [], f"redis keys without TTL: {keys}"

    async def _stop_all(self) -> None:
        if self.router is not None:
            await self.router.stop()
        # Prefill workers first, as an orderly shutdown does: decode workers then see their links end.
        for service in (*self.prefill, *self.decode):
            if service in self._running:
                await self._stop(service)

    async def _stop(self, service: Worker) -> None:
        self._running.remove(service)
        if (run := self._runs.get(service)) is not None:
            run.cancel()
            await asyncio.wait((run,))
        await service.stop()
