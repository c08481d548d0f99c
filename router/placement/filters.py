"""Which workers can take a request at all. Each filter answers for every worker, independently of the others.

A worker can take it that is connected, not draining, and whose KV pool could hold the request if it were empty. Whether
there is room now is the worker's own business.
"""

from __future__ import annotations

from typing import Protocol

from router.placement.fleet import Bools, Fleet
from router.placement.view import PlacementRequest


class Filter(Protocol):
    """One condition."""

    def keeps(self, request: PlacementRequest, fleet: Fleet) -> Bools:
        """By row: whether that worker may get `request`."""


class CanPrefill:
    """A prefill worker that can hold what is known."""

    def keeps(self, request: PlacementRequest, fleet: Fleet) -> Bools:
        """See Filter."""
        return fleet.prefill_limit >= request.num_known_tokens


class CanDecode:
    """A decode worker that can hold everything."""

    def keeps(self, request: PlacementRequest, fleet: Fleet) -> Bools:
        """See Filter."""
        return fleet.decode_limit >= request.max_total_tokens


class NotExcluded:
    """Not blamed by an earlier attempt of the request."""

    def keeps(self, request: PlacementRequest, fleet: Fleet) -> Bools:
        """See Filter."""
        return ~fleet.mask(request.excluded)
