"""The `nixl` transport: frames by NIXL writes, which UCX does by RDMA where there is any, by way of rings.

P writes from a ring of its own into one of D's; D copies into blocks what it has checked. Writing into the blocks
themselves would save a copy, but take addresses of blocks to P and quarantine of freed ones at D. Needs the `nixl`
extra and torch.
"""

from __future__ import annotations

import functools

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import (
    ReceivingTransport,
    SendingTransport,
    Sink,
    TransportContext,
    TransportKind,
    plain_offer,
)
from kv_transfer.transports.nixl_agent import require_package
from kv_transfer.transports.nixl_receiver import NixlReceiver
from kv_transfer.transports.nixl_sender import join_as_prefill
from kv_transfer.transports.torch_sender import TorchSender
from pdserve.types import DecodeTarget

require_package()

NAME = "nixl"
_KEEPALIVES_PER_TIMEOUT = 3


def _sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
    timeout_s = context.config.peer_timeout_s
    agent_name = f"prefill-{context.incarnation}-{link.generation}"
    join = functools.partial(join_as_prefill, agent_name, endpoint.attributes, timeout_s)
    return TorchSender(join, link, timeout_s / _KEEPALIVES_PER_TIMEOUT)


def _receiving(context: TransportContext, sink: Sink) -> ReceivingTransport:
    return NixlReceiver(context, sink, NAME)


NIXL = TransportKind(name=NAME, one_sided=False, offer=plain_offer(NAME), sending=_sending, receiving=_receiving)
