"""The bytes that are moved: requests of SmolLM2-135M in the scattered blocks of a pool, the same in both processes."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import xxhash

from kv_transfer import TransferConfig
from kv_transfer.chunk_io import ChunkIo, decode_io, prefill_io
from kv_transfer.messages import LinkId
from kv_transfer.plan import ChunkPlan
from kv_transfer.wire import Frame
from kv_transfer.wire_format import WireFormat
from pdserve.engine.host_store import HostBlockStore
from pdserve.engine.shared_pool import allocate_pool
from pdserve.kv_layout import KvLayout

LAYOUT = KvLayout(dtype="float16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
"""SmolLM2-135M: 360 KiB a block."""
NUM_TOKENS = 512
"""Of a request: 32 blocks, 11.8 MB."""
NUM_SLOTS = 4
"""Requests that take turns, so that none is in the cache of the other core from the time before."""

LINK = LinkId("prefill", 1)
"""Of transports without hand-off."""


class Pool:
    """A pool in memory like a worker's, of which each slot, a request, has blocks that lie anywhere."""

    def __init__(self, num_blocks: int) -> None:
        random = np.random.default_rng(0)
        self._order: list[int] = random.permutation(num_blocks).tolist()
        shape = (num_blocks, LAYOUT.num_layers, LAYOUT.layer_nbytes // 4)
        memory = allocate_pool(num_blocks * LAYOUT.block_nbytes)
        words: npt.NDArray[np.int32] = memory.data.view(np.int32).reshape(shape)
        # Written, so that every page is there before anything is timed.
        words[...] = random.integers(-(2**31), 2**31, shape, dtype=np.int32)
        # In huge pages where the kernel has them, as a worker's pool is some seconds after it has come into use.
        for shared in memory.shared:
            shared.collapse()
        self.blocks = words
        self.store = HostBlockStore(LAYOUT, words)

    def slot(self, number: int, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
        """Blocks of the request in this slot; slots differ in length if asked for with other numbers of tokens."""
        n = LAYOUT.num_blocks(num_tokens)
        assert (number + 1) * n <= len(self._order), "no such slot"
        return tuple(self._order[number * n : (number + 1) * n])

    def pieces(self, slot: int, plan: ChunkPlan) -> list[memoryview]:
        """Writable views of a slot, in the order and in the pieces in which the plan's chunks have them."""
        io = decode_io(self.store, plan.wire)
        views: list[memoryview] = []
        for seq in range(plan.num_chunks):
            views += io.views(self.slot(slot), plan.chunk(seq)) or ()
        return views

    def digest(self, slot: int, num_tokens: int = NUM_TOKENS) -> int:
        """Of all bytes of a slot, in order."""
        digest = xxhash.xxh3_64()
        for block in self.slot(slot, num_tokens):
            digest.update(self.blocks[block].data)
        return digest.intdigest()

    def clear(self, slot: int, num_tokens: int = NUM_TOKENS) -> None:
        """Overwrite a slot, so that it shows whether something arrives."""
        self.blocks[list(self.slot(slot, num_tokens))] = 0


def plan_of(chunk_bytes: int) -> ChunkPlan:
    """How a request is cut with the workers' default settings but for the size of chunks."""
    return ChunkPlan.make(NUM_TOKENS, LAYOUT, chunk_bytes, tail_tokens=512)


def config_of(transport: str, chunk_bytes: int) -> TransferConfig:
    """Default settings of hand-offs over this transport alone, but for the size of chunks."""
    return TransferConfig(transports=(transport,), target_chunk_bytes=chunk_bytes)


def frames_of(pool: Pool, slot: int, plan: ChunkPlan) -> list[Frame]:
    """All chunks of the request in `slot`; the number of the slot is in their nonces."""
    io: ChunkIo = prefill_io(pool.store, WireFormat.like(LAYOUT))
    blocks = pool.slot(slot)

    def frame(seq: int) -> Frame:
        chunk = plan.chunk(seq)
        return Frame(plan.header(seq, nonce=slot + 1, attempt=1), lambda: io.read(blocks, chunk))

    return [frame(seq) for seq in range(plan.num_chunks)]


def cpu_clock(pid: int) -> int:
    """The clock of all CPU time of a process, for `time.clock_gettime`: what clock_getcpuclockid(3) gives."""
    clock = (~pid << 3) | 2
    time.clock_gettime(clock)  # raises OSError now rather than later
    return clock
