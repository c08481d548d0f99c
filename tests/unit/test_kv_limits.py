"""The longest prompt and the longest sequence that a fleet takes, by the pools and windows of its workers."""

from __future__ import annotations

import pytest

from pdserve.config.schema import HealthSection
from pdserve.kv_layout import KvLayout
from pdserve.kv_window import NO_WINDOW, KvWindow
from pdserve.store.membership import MembershipChange
from pdserve.store.worker_codec import WorkerRecord
from pdserve.testing.replay_router import silent_session
from pdserve.types import Role, WorkerStats
from pdserve.worker_info import WorkerInfo
from router.worker_pool import KvLimits, ModelIdentity, WorkerPool

WINDOW = KvWindow(256)


def info(role: Role, num_blocks: int, window: KvWindow = WINDOW, *, chunk_tokens: int = 0) -> WorkerInfo:
    """With blocks of 16 tokens."""
    return WorkerInfo(
        worker_id=f"{role}-{num_blocks}",
        incarnation="1",
        role=role,
        address="",
        model="m",
        model_fingerprint="f",
        kv_layout=KvLayout(dtype="float32", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, window=window),
        num_blocks=num_blocks,
        max_model_len=8000,
        transports=("grpc",),
        version="1",
        prefill_chunk_tokens=chunk_tokens,
    )


@pytest.mark.parametrize(
    ("infos", "prompt", "sequence"),
    [
        # A window: what grows by decoding needs room for what it sees, a prompt for all of its tokens.
        ([info(Role.DECODE, 100, chunk_tokens=64)], 1600, 8000),
        ([info(Role.PREFILL, 200), info(Role.DECODE, 100, chunk_tokens=64)], 3200, 8000),
        ([info(Role.PREFILL, 50), info(Role.DECODE, 100, chunk_tokens=64)], 1600, 8000),
        ([info(Role.PREFILL, 50), info(Role.DECODE, 100)], 800, 8000),
        ([info(Role.DECODE, 1000, chunk_tokens=64)], 8000, 8000),
        # A pool that does not hold what one stream sees.
        ([info(Role.DECODE, 20, chunk_tokens=64)], 320, 320),
        ([info(Role.DECODE, 100, NO_WINDOW, chunk_tokens=64)], 1600, 1600),
    ],
)
async def test_prompts_are_bounded_by_pools_and_sequences_by_what_they_see(
    infos: list[WorkerInfo], prompt: int, sequence: int
) -> None:
    model = ModelIdentity(name="m", fingerprint="f")
    pool = WorkerPool(router_id="r", model=model, health=HealthSection(), open_session=silent_session)
    try:
        pool.apply(MembershipChange(joined=tuple(WorkerRecord(info=one, stats=WorkerStats()) for one in infos)))
        assert pool.limits() == KvLimits(prefill_tokens=prompt, decode_tokens=sequence)
    finally:
        await pool.aclose()
