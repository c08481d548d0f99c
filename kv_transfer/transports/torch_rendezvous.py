"""How two workers that have no world in common form a pair: over a store that the decode worker hosts.

One `TCPStore` per decode worker; each pair has a name in it that is used once. Whoever reaches the store's port can
take part: like gloo and NCCL themselves, this is for networks that are trusted.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from kv_transfer.messages import LinkId
from kv_transfer.transports.torch_channel import DECODE_RANK, PREFILL_RANK, PairError
from kv_transfer.transports.torch_gloo import first_line

logger = logging.getLogger(__name__)

_ARRIVED = "prefill-arrived"
_FORMED = "prefill-formed"
_KEYS = (_ARRIVED, _FORMED, f"0/{PREFILL_RANK}", f"0/{DECODE_RANK}")
"""Ours, and the addresses that gloo leaves."""
_POLL_S = (0.002, 0.05)
"""First and longest pause between looks for the prefill worker."""


class PairStore:
    """The decode worker's store."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listens on `host`, an address of this machine, at a free port. Raises OSError if that cannot be."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family)
        self.port: int = listener.getsockname()[1]
        # TCPStore by itself listens on all interfaces. It owns the descriptor that it is given.
        self._store = TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def client(self) -> Store:
        """A connection of its own: a call that waits on a shared one would hold up every other pair.

        Raises PairError.
        """
        try:
            client: Store = self._store.clone()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise PairError(f"our own store: {first_line(error)}") from error
        return client

    def forget(self, name: str) -> None:
        """Remove what the pair's two sides have written. Neither may still be building its group: gloo takes a key that
        goes away between its two looks for an empty address, and brings the process down."""
        try:
            names = PrefixStore(name, self.client())
            for key in _KEYS:
                names.delete_key(key)
        except (RuntimeError, PairError) as error:
            logger.warning("what is left of a pair stays in our store: %s", first_line(error))


def pair_name(decode_incarnation: str, link: LinkId) -> str:
    """A name that has never been used. The random part keeps others from guessing it."""
    return f"kv/{decode_incarnation}/{link.prefill_incarnation}/{link.generation}/{secrets.token_hex(16)}"


def reach_store(address: str, timeout_s: float) -> Store:
    """Connect to the decode worker's store at `address`, "host:port". Raises PairError after `timeout_s`."""
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(
            host.strip("[]"),
            int(port),
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise PairError(f"store of the decode worker at {address}: {first_line(error)}") from error


def announce_arrival(store: Store, name: str) -> None:
    """Prefill side, right before it builds the group. Raises PairError."""
    try:
        PrefixStore(name, store).set(_ARRIVED, "1")
    except RuntimeError as error:
        raise PairError(f"store of the decode worker: {first_line(error)}") from error


def announce_formed(store: Store, name: str) -> None:
    """Prefill side, when it is done with the store, whether it has built the group or failed."""
    # If the store is gone there is nothing in it to be removed.
    with contextlib.suppress(RuntimeError):
        PrefixStore(name, store).set(_FORMED, "1")


def await_arrival(store: Store, name: str, timeout_s: float, stopped: Callable[[], bool]) -> bool:
    """Decode side: wait until the prefill worker builds the group. False if it is `stopped` or too late.

    The group's constructor itself could neither be interrupted nor told how long to wait. Raises PairError.
    """
    return _await(store, name, _ARRIVED, timeout_s, stopped)


def await_formed(store: Store, name: str, timeout_s: float) -> None:
    """Decode side: wait until the prefill worker is done with the store, or has had all the time there is."""
    with contextlib.suppress(PairError):
        _await(store, name, _FORMED, timeout_s, lambda: False)


def _await(store: Store, name: str, key: str, timeout_s: float, stopped: Callable[[], bool]) -> bool:
    names = PrefixStore(name, store)
    pause_s, longest_s = _POLL_S
    deadline = time.monotonic() + timeout_s
    while not stopped() and time.monotonic() < deadline:
        try:
            if names.check([key]):
                return True
        except RuntimeError as error:
            raise PairError(f"our own store: {first_line(error)}") from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return False
