"""The decode side of the `torch` transport: hosts the store, and forms a pair for every link that wants one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import grpc

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import Sink, TransportContext
from kv_transfer.transports.torch_channel import DECODE_RANK, Channel
from kv_transfer.transports.torch_join import abilities, choose_backend, join_as_decode, side_of
from kv_transfer.transports.torch_lander import Lander
from kv_transfer.transports.torch_rendezvous import PairStore, pair_name
from pdserve.errors import ConfigError

STORE, GROUP, BACKEND = "store", "group", "backend"
"""Attributes of the endpoint: address of the store, name of the pair in it, and what the payload moves with."""


class TorchReceiver:
    """See `ReceivingTransport`."""

    def __init__(self, context: TransportContext, sink: Sink, name: str) -> None:
        self._context = context
        self._sink = sink
        self._name = name
        self._side = side_of(context, DECODE_RANK)
        self._abilities: Mapping[str, str] = abilities(self._side.device)
        self._store: PairStore | None = None
        self._landers: dict[LinkId, Lander] = {}
        self._ending: list[Lander] = []
        """Of fenced links; an operation may hold their threads for a while."""

    def register(self, server: grpc.aio.Server) -> None:
        """Has a port of its own."""

    async def start(self) -> None:
        """Host the store. Raises ConfigError if there is no listening on the worker's host."""
        try:
            self._store = await asyncio.to_thread(PairStore, self._context.bind_host, self._side.timeout_s)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"host: the torch transport cannot listen on {self._context.bind_host}: {error}", field="host"
            ) from error

    async def aclose(self) -> None:
        """A peer that is frozen can hold this up for the time-out of one operation."""
        for link in list(self._landers):
            self.fence(link)
        ending, self._ending = self._ending, []
        if ending:
            await asyncio.to_thread(_join_all, ending)
        self._store = None

    def open(self, link: LinkId, offer: Endpoint) -> Endpoint | None:
        """Start to wait for the prefill worker. The name of the pair is secret and used once."""
        store = self._store
        if store is None:
            return None
        name = pair_name(self._context.incarnation, link)
        backend = choose_backend(offer.attributes, self._abilities)

        def join(stopped: Callable[[], bool]) -> Channel | None:
            return join_as_decode(self._side, store, name, backend, stopped)

        self.fence(link)
        self._landers[link] = Lander(link, self._sink, join)
        address = f"{self._context.advertised_host}:{store.port}"
        return Endpoint(self._name, {STORE: address, GROUP: name, BACKEND: backend})

    def fence(self, link: LinkId) -> None:
        """Nothing is claimed for this link any more; its pair ends in its own time."""
        self._ending = [lander for lander in self._ending if not lander.ended]
        lander = self._landers.pop(link, None)
        if lander is not None:
            lander.stop()
            self._ending.append(lander)


def _join_all(landers: list[Lander]) -> None:
    for lander in landers:
        lander.join()
