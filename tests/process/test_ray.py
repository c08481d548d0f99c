"""A deployment on a real Ray cluster of three nodes on this machine: launched, hurt under load, brought down. The long
form is in tests/chaos."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from pdserve.testing.ray_rig import NUM_TOKENS, Deployment, Load, RayRig, kill, ray_rig
from pdserve.testing.reference import greedy_reference

pytestmark = [
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def rig() -> Iterator[RayRig]:
    with ray_rig(2, cpus=2) as rig:
        yield rig


def test_a_deployment_survives_the_loss_of_a_process_and_of_a_supervisor_and_leaves_nothing(
    rig: RayRig, tiny_model: Path, tmp_path: Path
) -> None:
    """A launch, again without a change, a killed worker, a killed supervisor, and down: no request is lost."""
    deployment = Deployment(rig, tmp_path, tiny_model)
    deployment.run("launch")
    before = deployment.status()
    assert sorted(before) == ["decode-0", "prefill-0", "redis-0", "router-0"]
    assert all(p["phase"] == "ready" and p["current"] and p["starts"] == 1 for p in before.values())
    if os.geteuid() == 0:
        # Not at Ray's own 15, with which they would wait for whatever else the machine does.
        assert {psutil.Process(p["pid"]).nice() for p in before.values()} == {os.getpriority(os.PRIO_PROCESS, 0)}
    again = deployment.run("launch")
    assert "nothing to do" in again.stderr
    assert {n: p["pid"] for n, p in deployment.status().items()} == {n: p["pid"] for n, p in before.items()}

    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 300, int(n)).tolist() for n in rng.integers(20, 80, 4)]
    load = Load(deployment.address, prompts)
    load.learn(lambda asked: [output.ids for output in greedy_reference(tiny_model, asked, NUM_TOKENS)])
    with load.running(2):
        load.wait_for_more(2)
        kill(before["decode-0"]["pid"])
        deployment.wait_ready("the worker is back", lambda found: found["decode-0"]["starts"] == 2)
        load.wait_for_more(2)
        supervisor = psutil.Process(before["prefill-0"]["pid"]).parent()
        assert supervisor is not None
        kill(supervisor.pid)
        deployment.wait_ready(
            "the supervisor is back", lambda found: found["prefill-0"]["pid"] != before["prefill-0"]["pid"]
        )
        load.wait_for_more(2)
    processes = [psutil.Process(p["pid"]) for p in deployment.status().values()]
    deployment.run("launch", "--down")
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
    assert "nothing is launched" in deployment.run("launch", "--status", codes=(2,)).stderr
