"""Measurement of decisions: what one takes with many workers and a large index."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Final

from benchmarks.placement.index import BLOCK_SIZE, prompts, worker_keys
from pdserve.config.schema import DecodeSection, HealthSection
from pdserve.kv_layout import KvLayout
from pdserve.store.membership import MembershipChange
from pdserve.store.worker_codec import WorkerRecord
from pdserve.testing.replay_router import silent_session
from pdserve.testing.traces import NamedBlocks
from pdserve.types import Role, WorkerStats
from pdserve.worker_info import WorkerInfo
from router.events import FirstToken, Hello
from router.index import PrefixIndex, PrefixLocations, PrefixNames
from router.placement import PlacementRequest
from router.worker import Charge, PromptCharge
from router.worker_pool import ModelIdentity, Placement, WorkerPool

MODEL: Final = ModelIdentity(name="benchmark", fingerprint="benchmark")
LAYOUT: Final = KvLayout(dtype="bfloat16", block_size=BLOCK_SIZE, num_layers=32, num_kv_heads=8, head_dim=128)
OUTPUT_TOKENS: Final = 256
CHUNK_TOKENS: Final = DecodeSection().local_prefill_tokens_per_step
NUM_OPEN: Final = 1024
"""Requests whose load is charged at any time."""


async def decisions(index: PrefixIndex, num_tokens: int, num: int) -> dict[str, list[float]]:
    """Seconds of look-up and choice, by kind of prompt (see `prompts`), each after a change of the load."""
    pool = WorkerPool(router_id="router", model=MODEL, health=HealthSection(), open_session=silent_session)
    pool.apply(MembershipChange(joined=tuple(WorkerRecord(info=info, stats=WorkerStats()) for info in _infos())))
    for worker in pool.workers:
        worker.on_connected(Hello(worker.info, WorkerStats()))
    locations = PrefixLocations(MODEL.fingerprint, index, live=lambda: True)
    locations.follow({worker.key: BLOCK_SIZE for worker in pool.workers})
    samples: dict[str, list[float]] = {}
    open_requests: deque[tuple[str, Placement]] = deque()
    for number, (kind, blocks) in enumerate(prompts(index, num_tokens, num)):
        names = PrefixNames(partial(NamedBlocks, blocks), range(num_tokens))
        began = time.perf_counter()
        placement = pool.place(
            PlacementRequest(
                num_known_tokens=num_tokens,
                max_total_tokens=num_tokens + OUTPUT_TOKENS,
                cached=locations.held(names),
            )
        )
        samples.setdefault(kind, []).append(time.perf_counter() - began)
        assert placement is not None, "nobody takes it"
        _charge(f"r{number}", placement, num_tokens)
        open_requests.append((f"r{number}", placement))
        if len(open_requests) > NUM_OPEN:
            _discharge(*open_requests.popleft())
    await pool.aclose()
    return samples


def _charge(request_id: str, placement: Placement, num_tokens: int) -> None:
    """As an attempt does it."""
    estimate = placement.estimate
    prompt = PromptCharge(
        num_tokens=num_tokens,
        num_left=estimate.num_uncached_tokens,
        seconds=estimate.prefill_s,
    )
    computing = placement.prefill or placement.decode[0]
    computing.charge(request_id, Charge(num_sequences=1, prompt=prompt))
    if placement.prefill is not None:
        placement.decode[0].charge(request_id, Charge(held_tokens=num_tokens + OUTPUT_TOKENS, num_sequences=1))


def _discharge(request_id: str, placement: Placement) -> None:
    """With something to learn for the models."""
    computing = placement.prefill or placement.decode[0]
    estimate = placement.estimate
    first = FirstToken(
        request_id, 1, 0, 0, None, 1e-2 + 5e-5 * estimate.num_uncached_tokens, estimate.num_cached_tokens
    )
    computing.costs.prompt_computed(first, num_tokens=estimate.num_tokens, fetch_expected=False, view=computing.view())
    for worker in (computing, placement.decode[0]):
        worker.discharge(request_id)


def _infos() -> list[WorkerInfo]:
    keys = worker_keys()
    return [
        WorkerInfo(
            worker_id=key.worker_id,
            incarnation=key.incarnation,
            role=Role.PREFILL if number < len(keys) // 2 else Role.DECODE,
            address="",
            model=MODEL.name,
            model_fingerprint=MODEL.fingerprint,
            kv_layout=LAYOUT,
            num_blocks=1 << 16,
            max_model_len=1 << 17,
            transports=("grpc",),
            version="0",
            prefill_chunk_tokens=0 if number < len(keys) // 2 else CHUNK_TOKENS,
        )
        for number, key in enumerate(keys)
    ]
