"""Everything that befalls a deployment on Ray, under load: a node is lost, sizes change, all of it is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdserve.testing.ray_rig import NUM_TOKENS, Deployment, Load, RayRig, ray_rig
from pdserve.testing.reference import greedy_reference
from pdserve.testing.tiny_models import make_tiny_kv

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.long,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def rig() -> Iterator[RayRig]:
    with ray_rig(2, cpus=6) as rig:
        yield rig


def test_no_request_is_lost_while_nodes_go_sizes_change_and_everything_is_replaced(rig: RayRig, tmp_path: Path) -> None:
    model = make_tiny_kv(tmp_path / "tiny-kv")
    deployment = Deployment(rig, tmp_path, model)
    deployment.set(
        deployment__pools__prefill__replicas=2,
        deployment__pools__decode__replicas=2,
        deployment__update={"surge": False},
    )
    deployment.run("launch")
    found = deployment.status()
    for role in ("prefill", "decode"):
        assert found[f"{role}-0"]["node_id"] != found[f"{role}-1"]["node_id"], "a pool is not spread"
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 300, int(n)).tolist() for n in rng.integers(20, 80, 6)]
    load = Load(deployment.address, prompts)
    load.learn(lambda asked: [output.ids for output in greedy_reference(model, asked, NUM_TOKENS)])
    with load.running(3):
        load.wait_for_more(3)
        rig.kill_node(0)
        deployment.wait_ready("what was on the node is elsewhere", lambda found: len(found) == 6)
        load.wait_for_more(3)
        rig.add_node()
        deployment.run("scale", "prefill=3", "decode=1")
        assert sorted(deployment.status()) == [
            "decode-0", "prefill-0", "prefill-1", "prefill-2", "redis-0", "router-0",
        ]  # fmt: skip
        load.wait_for_more(3)
        before = deployment.status()
        deployment.set(
            kv__num_blocks=320, deployment__pools__prefill__replicas=2, deployment__pools__decode__replicas=2
        )
        planned = deployment.run("launch", "--dry-run").stdout
        assert "kv.num_blocks" in planned
        assert {n: p["pid"] for n, p in deployment.status().items()} == {n: p["pid"] for n, p in before.items()}
        deployment.run("launch")
        after = deployment.status()
        assert after["router-0"]["pid"] == before["router-0"]["pid"], "a router does not read the size of the pool"
        assert {p["pid"] for p in after.values() if p["role"] in ("prefill", "decode")}.isdisjoint(
            {p["pid"] for p in before.values()}
        )
        load.wait_for_more(3)
    deployment.run("launch", "--down")
