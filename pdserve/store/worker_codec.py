"""Workers as redis holds them: JSON in, dataclasses out, and nothing taken on trust."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from pdserve.addresses import check_address
from pdserve.errors import InvalidRequestError
from pdserve.kv_layout import DTYPE_NBYTES
from pdserve.types import WorkerStats
from pdserve.worker_info import WorkerInfo

T = TypeVar("T")

_INFO = TypeAdapter(WorkerInfo)
_STATS = TypeAdapter(WorkerStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One registered worker as last read from redis."""

    info: WorkerInfo
    stats: WorkerStats
    """As of its last renewal: for people and as a first guess. Routers balance on what the session streams report."""


def encode_info(info: WorkerInfo) -> str:
    """JSON with the field names of WorkerInfo."""
    return json.dumps(dataclasses.asdict(info), separators=(",", ":"))


def encode_stats(stats: WorkerStats) -> str:
    """JSON with the field names of WorkerStats."""
    return json.dumps(dataclasses.asdict(stats), separators=(",", ":"))


def decode_worker(worker_id: str, info: object, stats: object) -> WorkerRecord:
    """The record stored under `worker_id`. Fields of newer versions are ignored.

    Raises ValueError saying what is wrong, without quoting values, when this is not something a worker wrote.
    """
    if not isinstance(info, bytes) or not isinstance(stats, bytes):
        raise ValueError("fields `info` and `stats` are missing")
    decoded = _validated(_INFO, "info", info)
    if decoded.worker_id != worker_id:
        raise ValueError("`info.worker_id` is not the id in the key")
    if not decoded.incarnation or not decoded.address:
        raise ValueError("`info.incarnation` or `info.address` is empty")
    try:
        check_address(decoded.address, "info.address")
    except InvalidRequestError:
        raise ValueError("`info.address` is not host:port") from None
    layout = decoded.kv_layout
    if layout.dtype not in DTYPE_NBYTES:
        raise ValueError("`info.kv_layout.dtype` is unknown")
    counts = (layout.block_size, layout.num_layers, layout.num_kv_heads, layout.head_dim, decoded.num_blocks)
    if min(*counts, decoded.max_model_len) < 1:
        raise ValueError("a size in `info` is not positive")
    if not 0 <= decoded.prefill_pause_s < math.inf:
        raise ValueError("`info.prefill_pause_s` is not finite, or negative")
    return WorkerRecord(info=decoded, stats=_validated(_STATS, "stats", stats))


def _validated(adapter: TypeAdapter[T], name: str, raw: bytes) -> T:
    """Raises ValueError with one line: the path and the first problem, without the value."""
    try:
        return adapter.validate_json(raw, strict=True)
    except ValidationError as e:
        first = e.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join((name, *map(str, first["loc"])))
        raise ValueError(f"`{path}`: {first['msg']}") from e
