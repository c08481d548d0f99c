"""The chunk plan: which bytes chunk number `seq` carries, as a pure function both workers evaluate for themselves.

           body: token by token            tail: layer by layer
    layers      ▼ tokens ▶                      tokens ▶
    0-9    seq 0    seq 1    seq 2         seq 3    seq 4    seq 5
    10-19  seq 0    seq 1    seq 2         seq 6    seq 7    seq 8
    20-29  seq 0    seq 1    seq 2         seq 9    seq 10   seq 11

The body follows the steps of a chunked prefill: each step makes some more tokens final in all layers. The tail is what
the last step is likely to compute. It is cut into layer groups, so that it can leave while deeper layers are being
computed, and only the last group is still to be sent when the first token is drawn.

Both are cut in units of tokens that are whole blocks on both sides, and at the borders of heads that lie in different
shards of either side (`wire_format.py`); a unit larger than a chunk is split into layer groups in the body too.

The decode worker may hold the KV of leading tokens already. A plan then begins with the first token it lacks; `seq`
counts from there.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property

import xxhash

from kv_transfer.wire import ChunkHeader
from kv_transfer.wire_format import WireFormat
from pdserve.errors import InvalidRequestError
from pdserve.kv_layout import KvLayout

MIN_PIECE_NBYTES = 64 << 10
"""A layer group of a block in the tail is at least this large: smaller contiguous pieces cost more than they hide."""
MIN_TAIL_CHUNK_NBYTES = 256 << 10
"""So is a chunk of the tail, as far as there is so much of it: every chunk has a fixed cost on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one chunk holds: a range of layers, heads and tokens."""

    seq: int
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    block_begin: int
    """In blocks of the sender, counted from the start of the sequence."""
    block_end: int
    token_begin: int
    """The first token that the receiver lacks; the payload still covers the first block of the sender whole."""
    token_end: int
    """At most the number of tokens; the payload still covers the last block of the sender whole."""
    nbytes: int
    """Of the payload."""


@dataclass(frozen=True, slots=True, order=True)
class Frontier:
    """How far the KV of a sequence is final, that is, in its blocks and never written again.

    What has been said once stays true, so the larger of two is as good as both.
    """

    num_tokens: int = 0
    """Leading tokens that are final in all layers."""
    step_tokens: int = 0
    """Leading tokens that will be after the step that is running; 0 if none is."""
    step_layers: int = 0
    """Leading layers in which they are by now."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a range of units is cut into chunks."""

    unit_begin: int
    unit_end: int
    units_per_chunk: int
    layers_per_chunk: int
    """In the last group there may be fewer."""
    num_layers: int

    @property
    def unit_groups(self) -> int:
        return -(-(self.unit_end - self.unit_begin) // self.units_per_chunk)

    @property
    def layer_groups(self) -> int:
        return -(-self.num_layers // self.layers_per_chunk)

    def groups_below(self, unit: int) -> int:
        """Groups of units that end at `unit` or before."""
        if unit >= self.unit_end:
            return self.unit_groups
        return max(0, unit - self.unit_begin) // self.units_per_chunk

    def layer_groups_below(self, layer: int) -> int:
        """Groups of layers that end at `layer` or before."""
        return self.layer_groups if layer >= self.num_layers else layer // self.layers_per_chunk


@dataclass(frozen=True)
class ChunkPlan:
    """All chunks of one hand-off. Made by `make`, `on` and `after`.

    What both sides ask for with every chunk is computed once (hence a `__dict__`, and no slots).
    """

    wire: WireFormat
    num_tokens: int
    """Tokens that the receiver has in the end."""
    target_chunk_bytes: int
    tail_tokens: int
    first_token: int
    """The first one that is sent: whole blocks of the receiver come before it."""
    body: _Cut
    tail: _Cut

    @classmethod
    def make(cls, num_tokens: int, layout: KvLayout, target_chunk_bytes: int, *, tail_tokens: int = 0) -> ChunkPlan:
        """The plan for `num_tokens` tokens and a receiver whose blocks are like the sender's, which are of `layout`.

        Chunks are of at most `target_chunk_bytes`, but at least a layer of a unit. The last `tail_tokens` tokens are
        cut layer by layer. Raises InvalidRequestError naming the parameter if there is nothing to send, or no room in a
        chunk.
        """
        for name, value, least in (
            ("num_tokens", num_tokens, 1),
            ("target_chunk_bytes", target_chunk_bytes, 1),
            ("tail_tokens", tail_tokens, 0),
        ):
            if value < least:
                raise InvalidRequestError(f"{name}: a hand-off needs at least {least}, got {value}", field=name)
        return cls._cut(WireFormat.like(layout), num_tokens, target_chunk_bytes, tail_tokens, 0)

    def on(self, wire: WireFormat) -> ChunkPlan:
        """The same hand-off over a link of this format."""
        assert wire.layout == self.layout, "a plan is in blocks of the sender"
        assert self.first_token == 0, "what the receiver holds is known after the format"
        return self._cut(wire, self.num_tokens, self.target_chunk_bytes, self.tail_tokens, 0)

    def after(self, num_held_tokens: int) -> ChunkPlan:
        """The same hand-off to a receiver that holds the first `num_held_tokens` tokens.

        Raises InvalidRequestError unless these are whole blocks of the receiver and leave something to send.
        """
        block_size = self.wire.receiver_block_size
        if not 0 <= num_held_tokens < self.num_tokens or num_held_tokens % block_size:
            raise InvalidRequestError(
                f"num_held_tokens: {num_held_tokens} of {self.num_tokens} tokens are not whole blocks of {block_size}, "
                "with at least one token left to send",
                field="num_held_tokens",
            )
        return self._cut(self.wire, self.num_tokens, self.target_chunk_bytes, self.tail_tokens, num_held_tokens)

    @classmethod
    def _cut(cls, wire: WireFormat, num_tokens: int, target: int, tail_tokens: int, first_token: int) -> ChunkPlan:
        unit = wire.unit_tokens
        num_layers = wire.layout.num_layers
        piece = wire.layer_nbytes(max(end - begin for begin, end in wire.head_ranges))
        layer_of_unit = piece * (unit // wire.layout.block_size)
        unit_begin, unit_end = first_token // unit, -(-num_tokens // unit)
        tail_begin = unit_end
        tail_layers = num_layers
        if tail_tokens:
            tail_begin = max(unit_begin, max(0, num_tokens - tail_tokens) // unit)
            row = (unit_end - tail_begin) * layer_of_unit
            least = max(-(-MIN_PIECE_NBYTES // piece), -(-MIN_TAIL_CHUNK_NBYTES // row))
            # Rather smaller pieces than a second chunk for what little of a group of layers is left over.
            if 2 * (target // row) >= least > target // row:
                least = target // row
            tail_layers = _even(num_layers, min(least, target // layer_of_unit))
        if tail_layers == num_layers:
            tail_begin = unit_end  # not worth cutting, or not asked for
        body_layers = _even(num_layers, target // layer_of_unit)
        return cls(
            wire=wire,
            num_tokens=num_tokens,
            target_chunk_bytes=target,
            tail_tokens=tail_tokens,
            first_token=first_token,
            body=_Cut(unit_begin, tail_begin, max(1, target // (body_layers * layer_of_unit)), body_layers, num_layers),
            tail=_Cut(tail_begin, unit_end, max(1, target // (tail_layers * layer_of_unit)), tail_layers, num_layers),
        )

    @property
    def layout(self) -> KvLayout:
        """Of the sender's blocks."""
        return self.wire.layout

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence at the sender, those included that are not sent."""
        return self.layout.num_blocks(self.num_tokens)

    @property
    def first_block(self) -> int:
        """The first block of the sender that is sent."""
        return self.first_token // self.layout.block_size

    @cached_property
    def num_chunks(self) -> int:
        """Chunks in all; `seq` runs from 0 to this."""
        return self._num_body + self.tail.layer_groups * self.tail.unit_groups * len(self.wire.head_ranges)

    @cached_property
    def _num_body(self) -> int:
        return self.body.layer_groups * self.body.unit_groups * len(self.wire.head_ranges)

    @property
    def tail_layers(self) -> tuple[int, ...]:
        """Leading layers whose completion makes chunks of the tail sendable, ascending. Empty if it is not cut."""
        step = self.tail.layers_per_chunk
        if step >= self.tail.num_layers:
            return ()
        return (*range(step, self.tail.num_layers, step), self.tail.num_layers)

    @property
    def total_nbytes(self) -> int:
        """Payload of all chunks together."""
        layout = self.layout
        per_block = layout.num_layers * self.wire.layer_nbytes(layout.num_kv_heads)
        return (self.num_blocks - self.first_block) * per_block

    def chunk(self, seq: int) -> Chunk:
        """What chunk `seq` holds. Raises IndexError outside the plan."""
        known = self._chunks.get(seq)
        if known is None:
            known = self._chunks[seq] = self._make_chunk(seq)
        return known

    @cached_property
    def _chunks(self) -> dict[int, Chunk]:
        """Those that have been asked for."""
        return {}

    def _make_chunk(self, seq: int) -> Chunk:
        if not 0 <= seq < self.num_chunks:
            raise IndexError(f"chunk {seq} of {self.num_chunks}")
        if seq < self._num_body:
            cut = self.body
            cell, head = divmod(seq, len(self.wire.head_ranges))
            unit_group, layer_group = divmod(cell, cut.layer_groups)
        else:
            cut = self.tail
            cell, head = divmod(seq - self._num_body, len(self.wire.head_ranges))
            layer_group, unit_group = divmod(cell, cut.unit_groups)
        unit = cut.unit_begin + unit_group * cut.units_per_chunk
        token_begin = max(unit * self.wire.unit_tokens, self.first_token)
        last_unit = min(unit + cut.units_per_chunk, cut.unit_end)
        token_end = min(last_unit * self.wire.unit_tokens, self.num_tokens)
        layer_begin = layer_group * cut.layers_per_chunk
        layer_end = min(layer_begin + cut.layers_per_chunk, cut.num_layers)
        head_begin, head_end = self.wire.head_ranges[head]
        block_begin, block_end = token_begin // self.layout.block_size, self.layout.num_blocks(token_end)
        layer_nbytes = self.wire.layer_nbytes(head_end - head_begin)
        return Chunk(
            seq=seq,
            layer_begin=layer_begin,
            layer_end=layer_end,
            head_begin=head_begin,
            head_end=head_end,
            block_begin=block_begin,
            block_end=block_end,
            token_begin=token_begin,
            token_end=token_end,
            nbytes=(block_end - block_begin) * (layer_end - layer_begin) * layer_nbytes,
        )

    def header(self, seq: int, *, nonce: int, attempt: int) -> ChunkHeader:
        """What the frame of chunk `seq` must say under this ticket. Raises IndexError outside the plan."""
        chunk = self.chunk(seq)
        return ChunkHeader(
            nonce=nonce,
            attempt=attempt,
            seq=seq,
            dtype=self.wire.element,
            layer_begin=chunk.layer_begin,
            layer_end=chunk.layer_end,
            token_begin=chunk.token_begin,
            token_end=chunk.token_end,
            head_begin=chunk.head_begin,
            head_end=chunk.head_end,
            payload_nbytes=chunk.nbytes,
        )

    def sendable(self, frontier: Frontier) -> int:
        """The chunks that hold nothing but final KV, as a bit mask: bit `seq` stands for chunk `seq`.

        These are the first ones, unless a step begins or ends within the tail.
        """
        if frontier.num_tokens >= self.num_tokens:
            return _ones(self.num_chunks)
        done = self._whole_units(frontier.num_tokens)
        ahead = max(done, self._whole_units(frontier.step_tokens))
        heads = len(self.wire.head_ranges)
        # Body: the first groups of units whole, then some layer groups of each group of the running step.
        per_group = self.body.layer_groups * heads
        whole, started = self.body.groups_below(done), self.body.groups_below(ahead)
        layers = _ones(self.body.layer_groups_below(frontier.step_layers) * heads)
        mask = _ones(whole * per_group) | _repeat(layers, per_group, started - whole) << whole * per_group
        # Tail: of each layer group the first groups of units.
        row, num_final = self.tail.unit_groups * heads, self.tail.layer_groups_below(frontier.step_layers)
        ready = _ones(self.tail.groups_below(ahead) * heads)
        rest = _ones(self.tail.groups_below(done) * heads)
        rows = (
            _repeat(ready, row, num_final) | _repeat(rest, row, self.tail.layer_groups - num_final) << num_final * row
        )
        return mask | rows << self._num_body

    def _whole_units(self, num_tokens: int) -> int:
        """Units of the sequence that `num_tokens` leading tokens fill; the last one is filled by its last token."""
        if num_tokens >= self.num_tokens:
            return self.tail.unit_end
        return max(0, num_tokens) // self.wire.unit_tokens

    @cached_property
    def plan_hash(self) -> int:
        """64 bits that differ if the two sides would cut differently."""
        return xxhash.xxh3_64_intdigest(repr(astuple(self)).encode())


def _even(num_layers: int, at_most: int) -> int:
    """Layers per group in the fewest groups of at most so many (but at least 1) layers, as equal as they can be."""
    num_groups = -(-num_layers // max(1, at_most))
    return -(-num_layers // num_groups)


def _ones(count: int) -> int:
    return (1 << count) - 1


def _repeat(bits: int, stride: int, count: int) -> int:
    """`bits`, which are at most `stride`, `count` times."""
    return bits * (_ones(stride * count) // _ones(stride)) if stride and count > 0 else 0
