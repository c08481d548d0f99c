"""Which workers a request goes to: filter, then score in [0, 1], then pick. Pure; knows no connection and no clock."""

from router.placement.choose import Choice, LeastLoadedPlacement
from router.placement.view import PlacementRequest, WorkerKey, WorkerView

__all__ = ["Choice", "LeastLoadedPlacement", "PlacementRequest", "WorkerKey", "WorkerView"]
