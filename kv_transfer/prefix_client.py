"""How a prefill worker asks others for the KV of a prompt's beginning. The bytes come over a link of their own."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import grpc

from kv_transfer.codec import prefix_request_to_proto
from kv_transfer.messages import PrefixRequest
from pdserve.rpc.errors import error_of
from pdserve.rpc.v1.prefix_pb2_grpc import PrefixStoreStub
from pdserve.security.identity import ANY_WORKER
from pdserve.security.internal import PLAINTEXT, Channels
from pdserve.types import PrefixHolder

MAX_CHANNELS: Final = 32
"""Connections that are kept; above that the one used longest ago is closed. More than calls that run at once."""


class PrefixClient:
    """Keeps a connection to each holder it has asked. Belongs to one event loop."""

    def __init__(self, channels: Channels = PLAINTEXT) -> None:
        """`channels` makes the connections."""
        self._opener = channels
        self._version = channels.version
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        """By incarnation, least recently used first."""

    async def fetch(self, holder: PrefixHolder, request: PrefixRequest) -> int:
        """Leading tokens of what is wanted that `holder` has sent, and this worker acknowledged. 0: it holds nothing.

        Raises the PdServeError behind a failure, DeadlineExceededError after `request.timeout_s`. Cancelling the call
        makes the holder stop.
        """
        stub = PrefixStoreStub(await self._channel(holder))
        try:
            response = await stub.Fetch(prefix_request_to_proto(request), timeout=request.timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        return response.num_tokens

    async def aclose(self) -> None:
        """Close every connection; calls that run are cancelled."""
        channels, self._channels = list(self._channels.values()), OrderedDict()
        for channel in channels:
            await channel.close()

    async def _channel(self, holder: PrefixHolder) -> grpc.aio.Channel:
        if self._version != self._opener.version:
            # They would show the old certificate whenever they connect again.
            self._version = self._opener.version
            await self.aclose()
        channel = self._channels.get(holder.incarnation)
        if channel is None:
            channel = self._channels[holder.incarnation] = self._opener.open(holder.address, ANY_WORKER)
        self._channels.move_to_end(holder.incarnation)
        if len(self._channels) > MAX_CHANNELS:
            _, oldest = self._channels.popitem(last=False)
            await oldest.close()
        return channel
