"""The `torch` transport: frames through a 2-rank process group of torch.distributed for each link, built on demand.

gloo between host memories, NCCL between GPUs; the decode worker chooses. Both ends only touch staging buffers, so freed
blocks need no quarantine. Needs the `torch` extra.
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
)
from kv_transfer.transports.torch_channel import PREFILL_RANK
from kv_transfer.transports.torch_join import abilities, join_as_prefill, side_of
from kv_transfer.transports.torch_receiver import BACKEND, GROUP, STORE, TorchReceiver
from kv_transfer.transports.torch_sender import TorchSender
from pdserve.types import DecodeTarget

NAME = "torch"
KEEPALIVES_PER_TIMEOUT = 3
"""An idle receive of a gloo group times out like any other."""


def _offer(context: TransportContext) -> Endpoint:
    return Endpoint(NAME, abilities(side_of(context, PREFILL_RANK).device))


def _sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
    side = side_of(context, PREFILL_RANK)
    attributes = endpoint.attributes
    join = functools.partial(
        join_as_prefill,
        side,
        attributes.get(STORE, ""),
        attributes.get(GROUP, ""),
        attributes.get(BACKEND, ""),
    )
    return TorchSender(join, link, side.timeout_s / KEEPALIVES_PER_TIMEOUT)


def _receiving(context: TransportContext, sink: Sink) -> ReceivingTransport:
    return TorchReceiver(context, sink, NAME)


TORCH = TransportKind(name=NAME, one_sided=False, offer=_offer, sending=_sending, receiving=_receiving)
