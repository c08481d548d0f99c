"""Which process group two workers form, and how each side forms it. Without GPUs, or on one GPU, that is gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed import is_nccl_available
from torch.distributed.distributed_c10d import Store

from kv_transfer.transports.base import TransportContext
from kv_transfer.transports.torch_channel import DECODE_RANK, PREFILL_RANK, Channel, PairError
from kv_transfer.transports.torch_gloo import GlooChannel, gloo_group
from kv_transfer.transports.torch_nccl import AnnouncedChannel, NcclMover
from kv_transfer.transports.torch_rendezvous import (
    PairStore,
    announce_arrival,
    announce_formed,
    await_arrival,
    await_formed,
    reach_store,
)

GLOO, NCCL = "gloo", "nccl"
_WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 (compared with, not bound to)


@dataclass(frozen=True, slots=True)
class Side:
    """What forming a pair takes of one worker."""

    rank: int
    host: str
    """Address of this machine that gloo listens on and tells the other side."""
    device: torch.device
    timeout_s: float
    """Limit of each operation, and of each step of forming the pair."""


def side_of(context: TransportContext, rank: int) -> Side:
    """A worker as one side of pairs."""
    host = context.advertised_host if context.bind_host in _WILDCARDS else context.bind_host
    return Side(rank, host, torch.device(context.device), context.config.peer_timeout_s)


def abilities(device: torch.device) -> dict[str, str]:
    """For the offer of a prefill worker, and to compare it with. Empty if there is only gloo."""
    if device.type != "cuda" or not is_nccl_available():
        return {}
    # Builds of torch for CPUs lack what this imports.
    from kv_transfer.transports.torch_nccl_group import describe_gpu

    return describe_gpu(device)


def choose_backend(prefill: Mapping[str, str], decode: Mapping[str, str]) -> str:
    """NCCL between two GPUs with one version of it; it refuses two ranks on one device."""
    both_have_it = "nccl" in prefill and prefill["nccl"] == decode.get("nccl")
    return NCCL if both_have_it and prefill["gpu"] != decode["gpu"] else GLOO


def join_as_prefill(side: Side, store_address: str, name: str, backend: str) -> Channel:
    """Form the pair with the decode worker that hosts the store. Blocks. Raises PairError."""
    store = reach_store(store_address, side.timeout_s)
    announce_arrival(store, name)
    try:
        return _form(side, store, name, backend)
    finally:
        announce_formed(store, name)


def join_as_decode(
    side: Side, store: PairStore, name: str, backend: str, stopped: Callable[[], bool]
) -> Channel | None:
    """Form the pair once the prefill worker comes; None if it is `stopped` before, or late. Raises PairError."""
    client = store.client()
    if not await_arrival(client, name, side.timeout_s, stopped):
        return None
    try:
        return _form(side, client, name, backend)
    finally:
        # This side may be connected while the other one has still to read where it is.
        await_formed(client, name, side.timeout_s)
        store.forget(name)


def _form(side: Side, store: Store, name: str, backend: str) -> Channel:
    peer = DECODE_RANK if side.rank == PREFILL_RANK else PREFILL_RANK
    channel = GlooChannel(gloo_group(store, name, side.rank, side.host, side.timeout_s), peer)
    if backend == GLOO:
        return channel
    if backend != NCCL:
        raise PairError(f"process group backend {backend!r} is unknown to this worker")
    from kv_transfer.transports.torch_nccl_group import nccl_group

    nccl = nccl_group(store, f"{name}/nccl", side.rank, side.device, side.timeout_s)
    return AnnouncedChannel(channel, NcclMover(nccl, peer, side.device), side.timeout_s)
