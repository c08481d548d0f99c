"""How much each transport has carried and how often it has failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportTotals:
    """Of one transport on one side, over all its links since start. Probes do not count."""

    num_frames: int = 0
    """Chunks given to it, or taken from it; repeats included."""
    num_bytes: int = 0
    """Their payload."""
    num_errors: int = 0
    """Prefill side: failed connections and posts, and stalls. Decode side: damaged frames, and frames that do not fit
    the plan of their ticket."""
    num_fallbacks: int = 0
    """Prefill side: how often a link went on over another transport because this one had failed."""


class TransportCounters:
    """Totals being counted. Event loop only."""

    def __init__(self) -> None:
        self._totals: dict[str, TransportTotals] = {}

    def frame(self, transport: str, nbytes: int) -> None:
        """A frame was given to the transport, or has come from it."""
        old = self._of(transport)
        self._totals[transport] = TransportTotals(
            num_frames=old.num_frames + 1,
            num_bytes=old.num_bytes + nbytes,
            num_errors=old.num_errors,
            num_fallbacks=old.num_fallbacks,
        )

    def error(self, transport: str, *, fell_back: bool = False) -> None:
        """Something went wrong on it, perhaps so that another one takes over."""
        old = self._of(transport)
        self._totals[transport] = TransportTotals(
            num_frames=old.num_frames,
            num_bytes=old.num_bytes,
            num_errors=old.num_errors + 1,
            num_fallbacks=old.num_fallbacks + fell_back,
        )

    def snapshot(self) -> Mapping[str, TransportTotals]:
        """Totals by name of the transport; those that were never used are missing."""
        return dict(self._totals)

    def _of(self, transport: str) -> TransportTotals:
        return self._totals.get(transport, TransportTotals())
