"""How long things take on a worker, learned from what it reports. Pure: knows no clock, no connection, no other worker.

All times are seconds.
"""

from router.cost.backlog import NUM_SIZES, Backlog, size_of
from router.cost.decode import StepModel
from router.cost.fit import NUM_FIRST, OnlineFit
from router.cost.prefill import PrefillModel
from router.cost.standing import Peers, Shares, Standing
from router.cost.transfer import TransferModel

__all__ = [
    "NUM_FIRST",
    "NUM_SIZES",
    "Backlog",
    "OnlineFit",
    "Peers",
    "PrefillModel",
    "Shares",
    "Standing",
    "StepModel",
    "TransferModel",
    "size_of",
]
