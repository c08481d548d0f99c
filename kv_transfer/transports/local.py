"""`local`: workers of one user on one host. The decode worker reads the chunks out of the prefill worker's memory.

One copy, no work for the prefill worker beyond checksums, and no shared allocation. Where the kernel does not let one
process read the other, chunks go through the Unix socket that the two talk over (mode STREAM), which is still faster
than TCP. Files: `local_sender` and `local_greeting` at the prefill worker, `local_receiver`, `local_mover`,
`local_connection` and `local_stream` at the decode worker, `local_wire` between them.
"""

from __future__ import annotations

import functools

from kv_transfer.messages import LinkId
from kv_transfer.transports.base import (
    Endpoint,
    ReceivingTransport,
    SendingTransport,
    Sink,
    TransportContext,
    TransportKind,
)
from kv_transfer.transports.local_receiver import LocalReceiver
from kv_transfer.transports.local_sender import LocalSender
from kv_transfer.transports.local_wire import NAME, where_am_i
from kv_transfer.wire import ChunkHeader
from pdserve.kv_layout import KvLayout
from pdserve.types import DecodeTarget


def _offer(context: TransportContext) -> Endpoint:
    return Endpoint(NAME, where_am_i())


def _sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
    # What could be written in place, and is sent as it lies there, is memory of this process.
    at_once = context.config.codec == "none" and context.store.views((0,), 0, 1) is not None
    num_pieces = functools.partial(_most_pieces, context.store.layout) if at_once else None
    return LocalSender(endpoint.attributes, f"decode worker {target.worker_id}", num_pieces=num_pieces)


def _most_pieces(layout: KvLayout, chunk: ChunkHeader) -> int:
    """Pieces of a pool that a chunk without a codec lies in, or more than those if some of them adjoin."""
    num_layers, num_heads = chunk.layer_end - chunk.layer_begin, chunk.head_end - chunk.head_begin
    is_whole = num_heads == layout.num_kv_heads
    piece_nbytes = num_layers * layout.layer_nbytes if is_whole else num_heads * layout.head_nbytes
    return chunk.payload_nbytes // piece_nbytes


def _receiving(context: TransportContext, sink: Sink) -> ReceivingTransport:
    return LocalReceiver(context.incarnation, sink, context.strangers[NAME])


LOCAL = TransportKind(name=NAME, one_sided=False, offer=_offer, sending=_sending, receiving=_receiving)
