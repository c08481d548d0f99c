"""Single values of KV in a pool, found by an address that is worked out from the layout alone: an oracle for transfers.

Slow and plain on purpose. It shares no code with what moves or converts blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdserve.kv_layout import DTYPE_NBYTES, KvLayout
from pdserve.testing.kv_store import NumpyBlockStore


class Element(NamedTuple):
    """One value of the KV of a sequence."""

    token: int
    layer: int
    part: int
    """0 for K, 1 for V."""
    head: int
    dim: int


def elements(layout: KvLayout, token_begin: int, token_end: int) -> Iterator[Element]:
    """Every value of these tokens."""
    for token in range(token_begin, token_end):
        for layer in range(layout.num_layers):
            for part in range(2):
                for head in range(layout.num_kv_heads):
                    for dim in range(layout.head_dim):
                        yield Element(token, layer, part, head, dim)


def place(layout: KvLayout, element: Element) -> tuple[int, slice]:
    """(block of the sequence, bytes within one layer of that block)."""
    block, offset = divmod(element.token, layout.block_size)
    order = layout.v_order if element.part else layout.k_order
    within = {
        "token,dim": offset * layout.head_dim + element.dim,
        "dim,token": element.dim * layout.block_size + offset,
    }[order]
    head = element.part * layout.num_kv_heads + element.head
    at = head * layout.block_size * layout.head_dim + within
    size = DTYPE_NBYTES[layout.dtype]
    return block, slice(at * size, (at + 1) * size)


def value_of(store: NumpyBlockStore, blocks: Sequence[int], element: Element) -> bytes:
    """The bytes of one value of the sequence that has these blocks."""
    block, at = place(store.layout, element)
    return store.data[blocks[block], element.layer, at].tobytes()


def set_value(store: NumpyBlockStore, blocks: Sequence[int], element: Element, value: bytes) -> None:
    """Overwrite one value."""
    block, at = place(store.layout, element)
    store.data[blocks[block], element.layer, at] = list(value)


def wrong_tokens(
    source: NumpyBlockStore,
    source_blocks: Sequence[int],
    target: NumpyBlockStore,
    target_blocks: Sequence[int],
    token_begin: int,
    token_end: int,
) -> set[int]:
    """Tokens of which any value differs between two pools."""
    return {
        element.token
        for element in elements(source.layout, token_begin, token_end)
        if value_of(source, source_blocks, element) != value_of(target, target_blocks, element)
    }
