"""Launching on Ray, without Ray: what is planned, where things go, and what makes a process another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import load_config
from pdserve.config.deployment import Deployment, with_replicas, worker_pools
from pdserve.errors import ConfigError
from pdserve.ray.plan import Create, Existing, Remove, WantedPool, Wave, plan
from pdserve.ray.spec import ProcessSpec, changed_settings, specs_of
from pdserve.ray.spread import Machine, choose_machine, place

POOLS = {"redis": "redis", "router": "router", "long": "prefill", "short": "prefill", "decode": "decode"}


def deployment(**overrides: Any) -> Deployment:
    return load_config(environ={}, overrides={name.replace("__", "."): value for name, value in overrides.items()})


def carry_out(waves: Sequence[Wave], wanted: Sequence[WantedPool], existing: Sequence[Existing]) -> list[Existing]:
    """What there is afterwards. Checks that nothing is created twice and only what exists is removed."""
    pools = {pool.name: pool for pool in wanted}
    now = {process.name: process for process in existing}
    for wave in waves:
        for action in wave:
            if isinstance(action, Remove):
                del now[action.name]
            else:
                assert action.name not in now
                pool = pools[action.pool]
                now[action.name] = Existing(name=action.name, pool=pool.name, role=pool.role, digest=pool.digest)
    return list(now.values())


wanted_pools = st.lists(
    st.builds(
        lambda name, replicas, digest, surge: WantedPool(
            name=name, role=POOLS[name], replicas=replicas, digest=digest, surge=surge
        ),
        st.sampled_from(sorted(POOLS)), st.integers(0, 4), st.sampled_from("ab"), st.booleans(),
    ),
    unique_by=lambda pool: pool.name,
)  # fmt: skip
existing_processes = st.lists(
    st.builds(
        lambda pool, index, digest, intact: Existing(
            name=f"{pool}-{index}", pool=pool, role=POOLS[pool], digest=digest, intact=intact
        ),
        st.sampled_from(sorted(POOLS)), st.integers(0, 5), st.sampled_from("ab"), st.sampled_from([True, True, False]),
    ),
    unique_by=lambda process: process.name,
)  # fmt: skip


@given(wanted_pools, existing_processes)
def test_a_plan_leads_to_what_is_wanted_and_a_second_one_is_empty(
    wanted: list[WantedPool], existing: list[Existing]
) -> None:
    after = carry_out(plan(wanted, existing), wanted, existing)
    assert Counter((p.pool, p.digest) for p in after) == Counter(
        {(pool.name, pool.digest): pool.replicas for pool in wanted if pool.replicas}
    )
    assert all(process.intact for process in after)
    assert plan(wanted, after) == []


@given(wanted_pools, existing_processes)
def test_what_is_as_it_should_be_is_left_alone(wanted: list[WantedPool], existing: list[Existing]) -> None:
    removed = {action.name for wave in plan(wanted, existing) for action in wave if isinstance(action, Remove)}
    for pool in wanted:
        right = [p for p in existing if p.pool == pool.name and p.digest == pool.digest and p.intact]
        assert sum(p.name not in removed for p in right) == min(len(right), pool.replicas)


@given(wanted_pools, existing_processes)
def test_at_most_one_process_of_a_pool_is_missing_at_a_time(wanted: list[WantedPool], existing: list[Existing]) -> None:
    waves = plan(wanted, existing)
    for pool in wanted:
        served = [p for p in existing if p.pool == pool.name and p.intact]
        floor = min(len(served), pool.replicas) - (0 if pool.surge else 1)
        for end in range(len(waves) + 1):
            now = carry_out(waves[:end], wanted, existing)
            assert sum(p.pool == pool.name and p.intact for p in now) >= floor


def test_removal_goes_from_who_gives_work_to_who_gets_it() -> None:
    existing = [Existing(name=f"{pool}-0", pool=pool, role=role, digest="a") for pool, role in POOLS.items()]
    waves = plan([], existing)
    assert [{action.name for action in wave} for wave in waves] == [
        {"router-0"}, {"long-0", "short-0"}, {"decode-0"}, {"redis-0"},
    ]  # fmt: skip


def test_redis_is_there_before_anybody_needs_it() -> None:
    wanted = [
        WantedPool(name="decode", role="decode", replicas=1, digest="a"),
        WantedPool(name="redis", role="redis", replicas=1, digest="a"),
    ]
    assert plan(wanted, []) == [[Create("redis-0", "redis")], [Create("decode-0", "decode")]]


def test_a_changed_setting_concerns_only_who_reads_it() -> None:
    before, after = specs_of(deployment()), specs_of(deployment(decode__max_batch_size=9, local__start_timeout_s=7))
    assert {name for name in before if before[name].digest != after[name].digest} == {"decode"}
    assert changed_settings(before["decode"], after["decode"]) == ["decode.max_batch_size"]


def test_a_router_is_given_the_window_of_the_model_that_it_serves_and_nothing_else_of_the_engine() -> None:
    window = {"engine__attention_window": 128, "engine__attention_sinks": 8}
    before, after = specs_of(deployment())["router"], specs_of(deployment(**window))["router"]
    assert after.config["engine"] == {"attention_window": 128, "attention_sinks": 8}
    assert changed_settings(before, after) == ["engine.attention_sinks", "engine.attention_window"]
    assert specs_of(deployment(engine__threads=3))["router"].digest == before.digest


def test_a_spec_is_the_same_after_a_journey() -> None:
    for spec in specs_of(deployment()).values():
        again = ProcessSpec.from_json(spec.to_json())
        assert (again, again.digest) == (spec, spec.digest)


def test_a_worker_computes_with_as_many_threads_as_it_has_cores() -> None:
    pools = {"decode": {"role": "decode", "resources": {"cpus": 6.5, "gpus": 2}}}
    spec = specs_of(deployment(deployment__pools=pools))["decode"]
    assert spec.config["engine"]["threads"] == 6
    assert spec.bundle == {"CPU": 6.5, "GPU": 2.0}


def test_settings_of_a_pool_come_on_top_of_those_outside() -> None:
    pools = {
        "long": {"role": "prefill", "settings": {"prefill": {"max_waiting": 3}, "kv": {"num_blocks": 99}}},
        "decode": {"role": "decode", "replicas": 3},
    }
    config = deployment(deployment__pools=pools, kv__block_size=32, prefill__max_batch_tokens=64)
    prefill, decode = worker_pools(config)
    assert (prefill.config.prefill.max_waiting, prefill.config.prefill.max_batch_tokens) == (3, 64)
    assert (prefill.config.kv.num_blocks, prefill.config.kv.block_size) == (99, 32)
    assert (decode.config.kv.num_blocks, decode.replicas) == (None, 3)


def test_without_pools_there_are_the_workers_of_one_machine_and_they_can_be_scaled() -> None:
    config = with_replicas(deployment(local__prefill_workers=2), {"decode": 3, "router": 2})
    assert {pool.name: pool.replicas for pool in worker_pools(config)} == {"prefill": 2, "decode": 3}
    assert config.deployment.routers.replicas == 2


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"p": {"role": "prefill"}}, "at least one needs the role decode"),
        ({"router": {"role": "decode"}}, "the name is taken"),
        ({"d": {"role": "decode", "settings": {"prefill": {}}}}, "the pool has the role decode"),
        ({"d": {"role": "decode", "settings": {"kv": {"blocksize": 1}}}}, "settings.kv.blocksize: unknown key"),
        ({"d": {"role": "decode", "replicas": -1}}, "deployment.pools.d.replicas"),
        ({"D!": {"role": "decode"}}, "deployment.pools"),
        ({"d": {"role": "decode", "settings": {"decode": {"local_prefill_tokens_per_step": 0}}}}, "nobody computes"),
    ],
)
def test_what_is_wrong_with_a_deployment_is_said(pools: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deployment(deployment__pools=pools)


def machines(number: int, **total: float) -> list[Machine]:
    return [Machine(node_id=f"n{i}", total=total, labels={"zone": str(i % 2)}) for i in range(number)]


def test_a_pool_is_spread_and_two_pools_share_machines() -> None:
    nodes = machines(3, CPU=4.0)
    for pool in ("prefill", "decode"):
        for _ in range(3):
            chosen = choose_machine(nodes, pool, {"CPU": 2.0}, {})
            assert chosen is not None
            place(chosen, pool, {"CPU": 2.0})
    assert all(node.pools == Counter({"prefill": 1, "decode": 1}) for node in nodes)
    assert choose_machine(nodes, "decode", {"CPU": 1.0}, {}) is None


def test_a_process_goes_only_where_its_labels_and_resources_are() -> None:
    nodes = machines(2, CPU=1.0)
    found = choose_machine(nodes, "decode", {"CPU": 1.0}, {"zone": "1"})
    assert found is not None
    assert found.node_id == "n1"
    assert choose_machine(nodes, "decode", {"GPU": 1.0}, {}) is None
