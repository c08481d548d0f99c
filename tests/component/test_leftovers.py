"""What `pdserve demo` uses to find out whether something was left behind must find it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from redis import Redis

from pdserve.client import Client
from pdserve.errors import StoreError, UnavailableError
from pdserve.launch.verify import ProcessRecord, blocks_in_use, num_keys_without_ttl
from pdserve.rpc.v1 import common_pb2
from pdserve.store.keys import Keyspace
from pdserve.testing.fake_router import FakeRouter


def report(router: FakeRouter, *, blocks: int, generated: int) -> None:
    layout = common_pb2.KvLayout(
        dtype="float32",
        block_size=16,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        k_order="token,dim",
        v_order="token,dim",
    )
    router.status.workers.add(
        info=common_pb2.WorkerInfo(worker_id="d", role="decode", address="127.0.0.1:1", kv_layout=layout),
        stats=common_pb2.WorkerStats(blocks_in_use=blocks, generated_tokens_total=generated),
    )


def test_blocks_that_stay_in_use_are_counted() -> None:
    with FakeRouter() as router, Client(router.address) as client:
        report(router, blocks=3, generated=8)
        assert blocks_in_use(client, num_generated_tokens=8, timeout_s=0.2) == 3


def test_idle_workers_hold_nothing() -> None:
    with FakeRouter() as router, Client(router.address) as client:
        report(router, blocks=0, generated=8)
        assert blocks_in_use(client, num_generated_tokens=8, timeout_s=0.2) == 0


def test_a_report_from_before_the_last_token_proves_nothing() -> None:
    with FakeRouter() as router, Client(router.address) as client:
        report(router, blocks=0, generated=7)
        with pytest.raises(UnavailableError, match="not reported"):
            blocks_in_use(client, num_generated_tokens=8, timeout_s=0.2)


def test_a_process_that_stays_is_counted_and_a_dead_one_is_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        record = ProcessRecord()
        assert record.num_left() >= 1
        before = record.num_left()
        child.kill()
        child.wait()
        assert record.num_left() == before - 1


def test_keys_without_a_ttl_are_counted_in_our_deployment_only(redis_url: str, cluster_name: str) -> None:
    prefix = Keyspace(cluster_name).prefix
    with Redis.from_url(redis_url, protocol=2) as redis:
        redis.set(f"{prefix}with-ttl", "x", ex=60)
        redis.set(f"{Keyspace(cluster_name + '-other').prefix}forever", "x", ex=60)
        assert num_keys_without_ttl(redis_url, cluster_name, timeout_s=5) == 0
        redis.set(f"{prefix}forever", "x")
        try:
            assert num_keys_without_ttl(redis_url, cluster_name, timeout_s=5) == 1
        finally:
            redis.delete(f"{prefix}forever")


def test_a_redis_that_is_gone_is_an_error_and_not_zero_keys() -> None:
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1"):
        num_keys_without_ttl("redis://:secret@127.0.0.1:1/0", "c", timeout_s=1)
