"""`local`: workers of one user on one host. The decode worker reads the chunks out of the prefill worker's memory.

One copy, no work for the prefill worker beyond checksums, and no shared allocation. Where the kernel does not let one
process read the other, chunks go through the Unix socket that the two talk over (mode STREAM), which is still faster
than TCP. Files: `local_sender` and `local_greeting` at the prefill worker, `local_receiver`, `local_mover`,
`local_connection` and `local_stream` at the decode worker, `local_wire` between them.
"""

from __future__ import annotations

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
from pdserve.types import DecodeTarget


def _offer(context: TransportContext) -> Endpoint:
    return Endpoint(NAME, where_am_i())


def _sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
    return LocalSender(endpoint.attributes, f"decode worker {target.worker_id}")


def _receiving(context: TransportContext, sink: Sink) -> ReceivingTransport:
    return LocalReceiver(context.incarnation, sink, context.strangers[NAME])


LOCAL = TransportKind(name=NAME, one_sided=False, offer=_offer, sending=_sending, receiving=_receiving)
