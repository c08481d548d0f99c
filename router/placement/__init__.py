"""Where a request goes: filter, then cost in seconds, then pick. Pure; knows no connection and no clock."""

from router.placement.choice import Choice, Estimate
from router.placement.choose import MAX_DECODE, LeastTimePlacement, LocalLimits
from router.placement.fleet import Fleet
from router.placement.holdings import Holdings, WorkerGroup
from router.placement.relocate import Relocation
from router.placement.view import PlacementRequest, SharedView, WorkerKey, WorkerView

__all__ = [
    "MAX_DECODE",
    "Choice",
    "Estimate",
    "Fleet",
    "Holdings",
    "LeastTimePlacement",
    "LocalLimits",
    "PlacementRequest",
    "Relocation",
    "SharedView",
    "WorkerGroup",
    "WorkerKey",
    "WorkerView",
]
