"""The chunk plan: which bytes chunk number `seq` carries, as a pure function both workers evaluate for themselves.

    tokens ─▶     block group 0        block group 1     ...
    layers 0-9    seq 0                seq 3
    layers 10-19  seq 1                seq 4
    layers 20-29  seq 2                seq 5

Blocks that fit are grouped into one chunk; a block larger than a chunk is split into layer groups. The order follows
the tokens, so chunks become sendable in order of their numbers while a prompt is being computed.

The decode worker may hold the KV of leading blocks already. A plan then begins at the first block it lacks; `seq`
counts from there.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import xxhash

from kv_transfer.wire import ChunkHeader
from pdserve.errors import InvalidRequestError
from pdserve.kv_layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one chunk holds: a layer range of a range of blocks. Blocks are counted from the start of the sequence."""

    seq: int
    layer_begin: int
    layer_end: int
    block_begin: int
    block_end: int
    token_begin: int
    token_end: int
    """At most the number of tokens; the payload still covers the last block whole."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """All chunks of one hand-off."""

    layout: KvLayout
    num_tokens: int
    """Tokens that the receiver has in the end."""
    blocks_per_chunk: int
    layers_per_chunk: int
    """Layers in a chunk; the last group may be smaller. All layers if `blocks_per_chunk` > 1."""
    first_token: int = 0
    """The first one that is sent: a multiple of the block size."""

    @classmethod
    def make(cls, num_tokens: int, layout: KvLayout, target_chunk_bytes: int) -> ChunkPlan:
        """The plan for `num_tokens` tokens: chunks of at most `target_chunk_bytes`, but at least a layer of a block.

        Raises InvalidRequestError if there is nothing to send.
        """
        if num_tokens < 1:
            raise InvalidRequestError(
                f"num_tokens: a hand-off needs at least 1 token, got {num_tokens}", field="num_tokens"
            )
        if target_chunk_bytes < 1:
            raise InvalidRequestError(
                f"target_chunk_bytes: must be positive, got {target_chunk_bytes}", field="target_chunk_bytes"
            )
        if layout.block_nbytes <= target_chunk_bytes:
            return cls(layout, num_tokens, target_chunk_bytes // layout.block_nbytes, layout.num_layers)
        num_groups = -(-layout.num_layers // max(1, target_chunk_bytes // layout.layer_nbytes))
        return cls(layout, num_tokens, 1, -(-layout.num_layers // num_groups))

    def after(self, num_held_tokens: int) -> ChunkPlan:
        """The same hand-off to a receiver that holds the first `num_held_tokens` tokens.

        Raises InvalidRequestError unless these are whole blocks and leave something to send.
        """
        if not 0 <= num_held_tokens < self.num_tokens or num_held_tokens % self.layout.block_size:
            raise InvalidRequestError(
                f"num_held_tokens: {num_held_tokens} of {self.num_tokens} tokens are not whole blocks of "
                f"{self.layout.block_size}, with at least one token left to send",
                field="num_held_tokens",
            )
        return replace(self, first_token=num_held_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence on each side, those included that are not sent."""
        return self.layout.num_blocks(self.num_tokens)

    @property
    def first_block(self) -> int:
        """The first block that is sent."""
        return self.first_token // self.layout.block_size

    @property
    def layer_groups(self) -> int:
        """Chunks per block group."""
        return -(-self.layout.num_layers // self.layers_per_chunk)

    @property
    def num_chunks(self) -> int:
        """Chunks in all; `seq` runs from 0 to this."""
        return -(-(self.num_blocks - self.first_block) // self.blocks_per_chunk) * self.layer_groups

    @property
    def total_nbytes(self) -> int:
        """Payload of all chunks together."""
        return (self.num_blocks - self.first_block) * self.layout.block_nbytes

    def chunk(self, seq: int) -> Chunk:
        """What chunk `seq` holds. Raises IndexError outside the plan."""
        if not 0 <= seq < self.num_chunks:
            raise IndexError(f"chunk {seq} of {self.num_chunks}")
        block_group, layer_group = divmod(seq, self.layer_groups)
        block_begin = self.first_block + block_group * self.blocks_per_chunk
        block_end = min(block_begin + self.blocks_per_chunk, self.num_blocks)
        layer_begin = layer_group * self.layers_per_chunk
        layer_end = min(layer_begin + self.layers_per_chunk, self.layout.num_layers)
        return Chunk(
            seq=seq,
            layer_begin=layer_begin,
            layer_end=layer_end,
            block_begin=block_begin,
            block_end=block_end,
            token_begin=block_begin * self.layout.block_size,
            token_end=min(block_end * self.layout.block_size, self.num_tokens),
            nbytes=(block_end - block_begin) * (layer_end - layer_begin) * self.layout.layer_nbytes,
        )

    def header(self, seq: int, *, nonce: int, attempt: int) -> ChunkHeader:
        """What the frame of chunk `seq` must say under this ticket. Raises IndexError outside the plan."""
        chunk = self.chunk(seq)
        return ChunkHeader(
            nonce=nonce,
            attempt=attempt,
            seq=seq,
            dtype=self.layout.dtype,
            layer_begin=chunk.layer_begin,
            layer_end=chunk.layer_end,
            token_begin=chunk.token_begin,
            token_end=chunk.token_end,
            head_begin=0,
            head_end=self.layout.num_kv_heads,
            payload_nbytes=chunk.nbytes,
        )

    def num_sendable(self, num_final_tokens: int) -> int:
        """Chunks 0 … n-1 hold only tokens below the immutable frontier `num_final_tokens`; returns n."""
        if num_final_tokens >= self.num_tokens:
            return self.num_chunks
        full_blocks = max(0, num_final_tokens // self.layout.block_size - self.first_block)
        return full_blocks // self.blocks_per_chunk * self.layer_groups

    @property
    def plan_hash(self) -> int:
        """64 bits that differ if the two sides would cut differently."""
        key = (self.first_token, self.num_tokens, self.blocks_per_chunk, self.layers_per_chunk, *astuple(self.layout))
        return xxhash.xxh3_64_intdigest(repr(key).encode())
