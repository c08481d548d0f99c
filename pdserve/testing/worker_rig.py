"""Prefill and decode workers with fake engines, and a scripted router with sessions to all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pdserve.config import Config
from pdserve.security.identity import PeerRole
from pdserve.security.internal import Channels, InternalTls
from pdserve.testing.cluster import InProcessCluster
from pdserve.testing.fake_engine import FakeEngine, FakeEngines, expected
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.types import DecodeTarget, GenerationJob, HandoffId, PrefixHolder


def prompt_of(num_tokens: int, salt: int = 0) -> tuple[int, ...]:
    """Some prompt; another one for each `salt`."""
    return tuple(random.Random(num_tokens * 1000 + salt).choices(range(251), k=num_tokens))


@dataclass
class Rig:
    """A running cluster of fake engines and a router with sessions to all of it."""

    cluster: InProcessCluster
    router: ScriptedRouter
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    numbers: Any

    @property
    def targets(self) -> list[DecodeTarget]:
        """All decode workers, in order."""
        return [d.host.info.target for d in self.cluster.decode]

    def job(self, prompt: tuple[int, ...], max_new: int = 8, *, name: str | None = None, **rest: Any) -> GenerationJob:
        """A first attempt unless `rest` says otherwise."""
        fields: dict[str, Any] = {"attempt": 1, "num_prompt_tokens": len(prompt), **rest}
        return GenerationJob(
            request_id=name or f"q{next(self.numbers)}",
            router_id=self.router.router_id,
            token_ids=prompt,
            max_new_tokens=max_new,
            **fields,
        )

    async def submit(
        self, prompt: tuple[int, ...], max_new: int = 8, *, holders: Sequence[PrefixHolder] = (), **rest: Any
    ) -> HandoffId:
        """Send a job to the first prefill worker, with all decode workers as candidates."""
        return await self.router.submit(self.job(prompt, max_new, **rest), self.targets, holders=holders)

    async def works(self) -> None:
        """A canary: a request goes through."""
        key = await self.submit(prompt_of(20))
        await self.router.finished(key)
        assert self.router.output(key) == expected(prompt_of(20), 8)


@asynccontextmanager
async def rig(
    config: Config,
    *,
    prefill: int = 1,
    decode: int = 1,
    prefill_blocks: int = 64,
    decode_blocks: int = 64,
    prefill_block_size: int = 16,
    decode_block_size: int = 16,
    decode_block_sizes: Sequence[int] = (),
) -> AsyncIterator[Rig]:
    """Start everything; at the end check that nothing is left. `decode_block_sizes`: of each decode worker."""
    p = [FakeEngines(num_blocks=prefill_blocks, block_size=prefill_block_size) for _ in range(prefill)]
    sizes = decode_block_sizes or [decode_block_size] * decode
    d = [FakeEngines(num_blocks=decode_blocks, block_size=size) for size in sizes]
    cluster = InProcessCluster(config, prefill=prefill, decode=decode, prefill_engines=p, decode_engines=d)
    async with cluster:
        sessions = [
            *(("prefill", s.host.info.address) for s in cluster.prefill),
            *(("decode", s.host.info.address) for s in cluster.decode),
        ]
        channels = Channels(InternalTls.of(config, PeerRole.ROUTER))
        async with ScriptedRouter(*sessions, channels=channels) as router:
            yield Rig(cluster, router, [e.engine for e in p], [e.engine for e in d], itertools.count(1))
            for engine in (*(e.engine for e in p), *(e.engine for e in d)):
                engine.resume()
            await cluster.quiet()
