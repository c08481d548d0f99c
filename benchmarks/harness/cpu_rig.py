"""Our CPU engine as a contestant: batches as a worker builds them, without the worker."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.harness.workloads import Decode, Prefill, Samples, Workload
from pdserve.engine.batch import Batch, IntArray, SampleRequest, SequenceChunk, build_batch
from pdserve.engine.engine import Engine
from pdserve.types import SamplingParams

CHUNK_TOKENS = 512
"""Prompt tokens a step, as a worker's default token budget has it."""

GREEDY = SamplingParams(temperature=0.0)


class CpuRig:
    """Sequences of random tokens, each in blocks of its own, dealt in shuffled order as in a pool that was used."""

    def __init__(self, engine: Engine, *, seed: int = 0) -> None:
        self.engine = engine
        self._random = np.random.default_rng(seed)
        self._blocks = self._random.permutation(engine.num_blocks)

    @property
    def name(self) -> str:
        """As a contestant."""
        return "pdserve"

    def prepare(self) -> None:
        """Nothing: the engine is loaded."""

    def close(self) -> None:
        """Nothing: the engine goes with its last reference."""

    def measure(self, workloads: Sequence[Workload]) -> Samples:
        """See `Contestant`."""
        return {
            w: [w.num_tokens / (self.prefill_s(w) if isinstance(w, Prefill) else sum(self.step_times_s(w)))]
            for w in workloads
        }

    def prefill_s(self, workload: Prefill) -> float:
        """Seconds for one prompt, drawing its first token included."""
        tokens = self.random_tokens(workload.tokens)
        began = time.perf_counter()
        self._prefill(tokens, self._table(0, workload.tokens))
        return time.perf_counter() - began

    def step_times_s(self, workload: Decode, params: SamplingParams = GREEDY) -> list[float]:
        """Seconds of each decode step: packing the batch, the forward pass, and drawing the tokens that go on."""
        tables = self.fill(workload.batch, workload.context, workload.steps)
        return self.steps_s(tables, workload.context, workload.steps, params)

    def steps_s(
        self, tables: Sequence[IntArray], context: int, steps: int, params: SamplingParams = GREEDY
    ) -> list[float]:
        """The same of sequences that have their KV already, after one step that does not count."""
        self.engine.forward(self.decode_batch(tables, context, params))
        last = self.random_tokens(len(tables))
        times = []
        for i in range(steps):
            began = time.perf_counter()
            batch = self.decode_batch(tables, context + i, params, last)
            last = self.engine.forward(batch).token_ids.astype(np.int32)
            times.append(time.perf_counter() - began)
        return times

    def fill(self, batch: int, context: int, steps: int) -> list[IntArray]:
        """Block tables of `batch` sequences with K/V of `context` tokens and room for `steps` more.

        One is computed, the others are copies in blocks of their own: the bytes are as many and lie as far apart.
        """
        tables = [self._table(i, context + steps) for i in range(batch)]
        self._prefill(self.random_tokens(context), tables[0])
        store, layout = self.engine.store, self.engine.layout
        used = layout.num_blocks(context)
        for source, *targets in zip(*(table[:used].tolist() for table in tables), strict=True):
            for target in targets:
                store.copy(source, target)
        return tables

    def decode_batch(
        self,
        tables: Sequence[IntArray],
        context: int,
        params: SamplingParams | None = GREEDY,
        tokens: IntArray | None = None,
    ) -> Batch:
        """One token of each sequence after `context` others. `params` None draws nothing, so no logits are computed."""
        ids = self.random_tokens(len(tables)) if tokens is None else tokens
        samples = () if params is None else (SampleRequest(params=params),)
        return build_batch(
            [
                SequenceChunk(token_ids=ids[i : i + 1], start_position=context, block_table=table, samples=samples)
                for i, table in enumerate(tables)
            ],
            self.engine.layout.block_size,
        )

    def random_tokens(self, n: int) -> IntArray:
        """int32 [n] token ids."""
        return self._random.integers(0, self.engine.config.vocab_size, n, dtype=np.int32)

    def _table(self, index: int, tokens: int) -> IntArray:
        """int32 [blocks] of sequence number `index`, all of them being of `tokens` tokens."""
        count = self.engine.layout.num_blocks(tokens)
        assert (index + 1) * count <= len(self._blocks), "the pool is too small for this workload"
        return self._blocks[index * count : (index + 1) * count].astype(np.int32)

    def _prefill(
        self,
        tokens: IntArray,
        table: IntArray,
    ) -> None:
        for begin in range(0, len(tokens), CHUNK_TOKENS):
            chunk = SequenceChunk(
                token_ids=tokens[begin : begin + CHUNK_TOKENS],
                start_position=begin,
                block_table=table,
                samples=(SampleRequest(params=GREEDY),) if begin + CHUNK_TOKENS >= len(tokens) else (),
            )
            self.engine.forward(build_batch([chunk], self.engine.layout.block_size))


def blocks_needed(workloads: Sequence[Workload], block_size: int) -> int:
    """Blocks of a pool that holds any one of `workloads`."""

    def blocks(w: Workload) -> int:
        sequences, tokens = (1, w.tokens) if isinstance(w, Prefill) else (w.batch, w.context + w.steps)
        return sequences * -(-tokens // block_size)

    return max(blocks(w) for w in workloads)
