"""Which workers can take a request at all. Each filter answers for one worker, independently of the others."""

from __future__ import annotations

from typing import Protocol

from router.placement.view import PlacementRequest, WorkerView


class Filter(Protocol):
    """One condition."""

    def keeps(self, request: PlacementRequest, worker: WorkerView) -> bool:
        """Whether `worker` may get `request`."""


class Usable:
    """Connected and not draining."""

    def keeps(self, request: PlacementRequest, worker: WorkerView) -> bool:
        """See Filter."""
        return worker.usable


class Fits:
    """Its KV pool could hold the request if it were empty. Whether there is room now is the worker's own business."""

    def keeps(self, request: PlacementRequest, worker: WorkerView) -> bool:
        """See Filter."""
        return request.kv_tokens(worker.role) <= worker.max_kv_tokens


class NotExcluded:
    """Not blamed by an earlier attempt of the request."""

    def keeps(self, request: PlacementRequest, worker: WorkerView) -> bool:
        """See Filter."""
        return worker.key not in request.excluded
