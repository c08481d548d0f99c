"""The account of what a port has refused: every case counted, one line in the log per interval."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

log = logging.getLogger(__name__)

INTERVAL_S: Final = 60.0
"""A stranger who tries again and again writes a line of the log in each, for each reason."""


class Refusal(StrEnum):
    """Why."""

    HANDSHAKE = "handshake"
    """The connection ended before anything was asked: no TLS, no certificate, or one that is not trusted."""
    ROLE = "role"
    """The certificate is of the right authority, but not of a process that may ask this."""
    NO_KEY = "no_key"
    WRONG_KEY = "wrong_key"
    TOKEN = "token"  # noqa: S105 - a name for it
    """A connection to a listener of a KV transport that did not show the token of an open link."""
    REMOTE = "remote"
    """Asked by another machine for what only this one may ask, see local_guard.py."""


WORKER_REASONS: Final = (Refusal.HANDSHAKE, Refusal.ROLE)
TRANSPORT_REASONS: Final = (Refusal.TOKEN,)
WORKER_CALL_REASONS: Final = (*WORKER_REASONS, Refusal.REMOTE)
CLIENT_REASONS: Final = (Refusal.HANDSHAKE, Refusal.NO_KEY, Refusal.WRONG_KEY)


class Refusals:
    """Of one port. Any thread."""

    def __init__(self, port: str, reasons: tuple[Refusal, ...], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`port` is the setting that opens it, for the log; `reasons` what can happen there."""
        self._port = port
        self._reasons = reasons
        self._clock = clock
        self._counts: Counter[Refusal] = Counter()
        self._quiet: Counter[Refusal] = Counter()
        """Those since the last line."""
        self._logged_at: dict[Refusal, float] = {}
        self._lock = threading.Lock()

    @property
    def counts(self) -> Mapping[Refusal, int]:
        """Since the start, for every reason there can be."""
        return {reason: self._counts[reason] for reason in self._reasons}

    def note(self, reason: Refusal, peer: str, detail: str, number: int = 1) -> None:
        """`peer` is an address, `detail` says what was missing: neither may hold a key."""
        now = self._clock()
        with self._lock:
            self._counts[reason] += number
            last = self._logged_at.get(reason)
            if last is not None and now - last < INTERVAL_S:
                self._quiet[reason] += number
                return
            self._logged_at[reason] = now
            not_logged = self._quiet.pop(reason, 0)
        log.warning(
            "refused on %s (%s): %s",
            *(self._port, reason, detail),
            extra={"peer": peer, "not_logged": not_logged},
        )
