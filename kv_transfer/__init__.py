"""Moving KV blocks from prefill to decode workers: hand-off protocol, wire format, transports."""

from kv_transfer.config import TransferConfig
from kv_transfer.counters import TransportTotals
from kv_transfer.handoff import Handoff, HandoffResult
from kv_transfer.messages import Busy
from kv_transfer.receiver import HandoffReceiver, ReceiverStats
from kv_transfer.reservations import Admission, Room
from kv_transfer.sender import HandoffSender, SenderStats

__all__ = [
    "Admission",
    "Busy",
    "Handoff",
    "HandoffReceiver",
    "HandoffResult",
    "HandoffSender",
    "ReceiverStats",
    "Room",
    "SenderStats",
    "TransferConfig",
    "TransportTotals",
]
