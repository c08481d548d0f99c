"""Frames over plain TCP: sent by `sendmsg` straight from blocks and received straight into blocks, in threads.

The decode worker listens on a port of its own. A connection begins with an opening that names the link and proves by
its token that LinkWelcome was meant for the caller (`tcp_opening.py`); then come frames as in `wire.py`, back to back.
Nothing comes back but the answer to the opening: acknowledgements are the control stream's.

Neither encrypted nor authenticated beyond the token: for networks that are trusted.
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
    plain_offer,
)
from kv_transfer.transports.tcp_receiver import TcpReceiver
from kv_transfer.transports.tcp_sender import TcpSender
from pdserve.types import DecodeTarget


def _sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
    return TcpSender(endpoint, link)


def _receiving(context: TransportContext, sink: Sink) -> ReceivingTransport:
    return TcpReceiver(context, sink)


TCP = TransportKind(name="tcp", one_sided=False, offer=plain_offer("tcp"), sending=_sending, receiving=_receiving)
