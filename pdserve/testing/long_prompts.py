"""A long prompt end to end: workers, hand-off and router in one process, watched for what grows with the length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.client import AsyncClient, Generation
from pdserve.config import Config
from pdserve.testing.cluster import InProcessCluster
from pdserve.testing.tiny_families import make_tiny_family

BEAT_S = 0.001


def make_long_model(directory: Path, rope: str, *, trained: int, factor: float) -> Path:
    """One layer, trained for `trained` tokens as far as its files say, and stretched by `factor`. `rope` is yarn or
    llama3."""
    scaling: dict[str, object] = {"factor": factor, "original_max_position_embeddings": trained, "rope_type": rope}
    if rope == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return make_tiny_family(
        directory,
        "llama",
        num_hidden_layers=1,
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=int(trained * factor),
        rope_parameters=scaling | {"rope_theta": 10000.0},
    )


@dataclass(slots=True)
class LoopWatch:
    """How long the event loop was kept from anything else: the most that it has computed without a pause, in CPU time,
    so that other processes do not count."""

    longest_s: float = 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Around what must not hold it up."""
        task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            task.cancel()

    async def _beat(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.thread_time()
            self.longest_s = max(self.longest_s, now - last)
            last = now


async def long_answer(
    config: Config, prompt: Sequence[int], num_tokens: int
) -> tuple[Generation, Generation, LoopWatch]:
    """Greedy, by a pair of workers: the prompt alone, and once more, found in the cache, with a penalty for each of its
    tokens; and the watch over both."""
    watch = LoopWatch()
    async with InProcessCluster(config, router=True) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=300.0) as client:
            await client.generate(token_ids=prompt[:40], max_tokens=2)
            async with watch.watching():
                first = await client.generate(token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
                again = await client.generate(
                    token_ids=prompt,
                    max_tokens=num_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                    repetition_penalty=1.05,
                )
        assert cluster.decode[0].stats().prefill_tokens_total == 0, "it came by hand-off"
        await cluster.quiet()
    return first, again, watch
