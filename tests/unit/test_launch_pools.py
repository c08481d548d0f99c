"""`pdserve up` with a deployment of pools: the same file as on a cluster, on one machine."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config import load_config
from pdserve.config.deployment import Deployment
from pdserve.errors import ConfigError
from pdserve.launch.plan import ProcessPlan, plan_processes

POOLS: dict[str, Any] = {
    "decode": {"role": "decode", "replicas": 2, "settings": {"decode": {"max_batch_size": 5}}},
    "long": {"role": "prefill", "settings": {"engine": {"threads": 3}}},
    "short": {"role": "prefill"},
}


def plans(**overrides: Any) -> list[ProcessPlan]:
    settings = {"deployment.pools": POOLS, **{name.replace("__", "."): value for name, value in overrides.items()}}
    return plan_processes(
        load_config(environ={}, overrides=settings),
        store_url="redis://127.0.0.1:1",
        router_address="127.0.0.1:2",
        http_port=None,
        log_format="json",
        metrics_listen=[f"127.0.0.1:{port}" for port in (11, 12, 13, 14)],
    )


def test_there_is_one_router_and_the_workers_of_every_pool_prefill_first() -> None:
    found = plans(deployment__routers={"replicas": 3})
    assert [(plan.name, plan.command) for plan in found] == [
        ("router-0", "router"), ("long-0", "prefill"), ("short-0", "prefill"), ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]  # fmt: skip


def test_every_worker_has_the_settings_of_its_pool_and_addresses_of_its_own() -> None:
    _, long, short, *decode = plans(engine__threads=1)
    assert (long.config.engine.threads, short.config.engine.threads) == (3, 1)
    assert [plan.config.decode.max_batch_size for plan in decode] == [5, 5]
    assert [plan.config.decode.worker_id for plan in decode] == ["decode-0", "decode-1"]
    assert [plan.metrics_listen for plan in (long, short, *decode)] == [
        "127.0.0.1:11", "127.0.0.1:12", "127.0.0.1:13", "127.0.0.1:14",
    ]  # fmt: skip
    assert not any(isinstance(plan.config, Deployment) for plan in (long, short, *decode))


def test_workers_with_different_numbers_of_threads_are_not_pinned_together() -> None:
    assert {plan.config.engine.pin_threads for plan in plans(engine__threads=1)[1:]} == {False}
    with pytest.raises(ConfigError, match=r"engine\.pin_threads: true needs the same engine\.threads"):
        plans(engine__threads=1, engine__pin_threads=True)


def test_two_workers_of_a_pool_cannot_share_an_address() -> None:
    pools = POOLS | {"decode": {"role": "decode", "replicas": 2, "settings": {"decode": {"listen": "127.0.0.1:77"}}}}
    with pytest.raises(ConfigError, match=r"decode\.listen: 127.0.0.1:77 cannot be the address of 2 workers"):
        plans(deployment__pools=pools)
