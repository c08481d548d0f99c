"""Membership as a pure function of readings."""

from __future__ import annotations

from pdserve.kv_layout import KvLayout
from pdserve.store.membership import Membership, Snapshot
from pdserve.store.worker_codec import WorkerRecord
from pdserve.types import Role, WorkerStats
from pdserve.worker_info import WorkerInfo


def record(worker_id: str, incarnation: str = "1", num_running: int = 0) -> WorkerRecord:
    info = WorkerInfo(
        worker_id=worker_id,
        incarnation=incarnation,
        role=Role.DECODE,
        address="h:1",
        model="m",
        model_fingerprint="f",
        kv_layout=KvLayout(dtype="float16", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8),
        num_blocks=1,
        max_model_len=16,
        transports=("grpc",),
        version="0",
    )
    return WorkerRecord(info=info, stats=WorkerStats(num_running=num_running))


def snapshot(*records: WorkerRecord, generation: str = "g1") -> Snapshot:
    return Snapshot(generation=generation, workers={r.info.worker_id: r for r in records})


def test_first_reading_joins_everybody_and_the_same_again_is_no_change() -> None:
    membership = Membership(resync_s=10)
    assert membership.update(snapshot(record("a"), record("b")), 0.0).joined == (record("a"), record("b"))
    assert not membership.update(snapshot(record("a"), record("b")), 1.0)


def test_leaving_counts_at_once_while_redis_is_well() -> None:
    membership = Membership(resync_s=10)
    membership.update(snapshot(record("a"), record("b")), 0.0)
    change = membership.update(snapshot(record("b", num_running=2)), 1.0)
    assert (change.left, change.changed) == ((record("a"),), (record("b", num_running=2),))
    assert set(membership.workers) == {"b"}


def test_a_new_incarnation_is_another_worker() -> None:
    membership = Membership(resync_s=10)
    membership.update(snapshot(record("a", "1")), 0.0)
    change = membership.update(snapshot(record("a", "2")), 1.0)
    assert (change.left, change.joined, change.changed) == ((record("a", "1"),), (record("a", "2"),), ())


def test_absence_after_lost_data_counts_only_after_the_resync_time() -> None:
    membership = Membership(resync_s=10)
    membership.update(snapshot(record("a"), record("b")), 0.0)
    assert not membership.update(snapshot(generation="g2"), 1.0)
    assert not membership.update(snapshot(record("a"), generation="g2"), 10.9)
    assert membership.update(snapshot(record("a"), generation="g2"), 11.0).left == (record("b"),)


def test_absence_after_a_failed_reading_counts_only_after_the_resync_time() -> None:
    membership = Membership(resync_s=10)
    membership.update(snapshot(record("a")), 0.0)
    membership.reading_failed()
    membership.reading_failed()
    assert not membership.update(snapshot(), 100.0)
    assert membership.update(snapshot(), 110.0).left == (record("a"),)


def test_joining_counts_at_any_time() -> None:
    membership = Membership(resync_s=10)
    membership.reading_failed()
    assert membership.update(snapshot(record("a")), 1.0).joined == (record("a"),)
    assert membership.update(snapshot(record("b"), generation="g2"), 2.0).joined == (record("b"),)
