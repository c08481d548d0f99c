"""The files of deploy/ray: what Ray's own checks, which need no network, and ours say of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from pdserve.config import load_config
from pdserve.config.deployment import worker_pools

RAY = Path(__file__).parents[2] / "deploy" / "ray"
CLUSTERS = ("on-prem", "aws")


def cluster(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((RAY / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_up_takes_the_file(name: str) -> None:
    validate_config(prepare_config(cluster(name)))


def test_the_check_of_ray_up_finds_a_misspelt_key() -> None:
    with pytest.raises(Exception, match="head_start_ray_comands"):
        validate_config(prepare_config(cluster("on-prem") | {"head_start_ray_comands": []}))


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_start_of_ray_asks_for_the_token_and_the_token_is_there(name: str) -> None:
    tree = cluster(name)
    starts = [*tree["head_start_ray_commands"], *tree["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in command for command in starts if "ray start" in command)
    assert any(path.endswith("/.ray/auth_token") for path in tree["file_mounts"])


@pytest.mark.parametrize("path", ["deployment.yaml", "kuberay/deployment.yaml"])
def test_the_deployments_load(path: str) -> None:
    pools = worker_pools(load_config(RAY / path, environ={}))
    assert [(pool.name, pool.role, pool.replicas) for pool in pools] == [
        ("prefill", "prefill", 2), ("decode", "decode", 2),
    ]  # fmt: skip


def test_kuberay_runs_the_version_of_ray_that_is_tested_and_asks_for_a_token() -> None:
    tree, service = yaml.safe_load_all((RAY / "kuberay/raycluster.yaml").read_text())
    pins = (RAY.parents[1] / "constraints.txt").read_text()
    (version,) = re.findall(r"^ray==(.+)$", pins, re.MULTILINE)
    assert tree["spec"]["rayVersion"] == version
    assert tree["spec"]["authOptions"] == {"mode": "token"}
    config = load_config(RAY / "kuberay/deployment.yaml", environ={})
    (head,) = tree["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert config.router.listen == f"0.0.0.0:{ports['grpc']}"
    assert config.router.http_port == ports["http"]
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
    labels = config.deployment.routers.resources.labels
    assert tree["spec"]["headGroupSpec"]["rayStartParams"]["labels"] == ",".join(f"{k}={v}" for k, v in labels.items())
    (worker,) = tree["spec"]["workerGroupSpecs"]
    grace = worker["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > max(config.prefill.drain_timeout_s, config.decode.drain_timeout_s)


def test_the_cluster_of_kuberay_has_room_for_its_deployment() -> None:
    tree, _ = yaml.safe_load_all((RAY / "kuberay/raycluster.yaml").read_text())
    config = load_config(RAY / "kuberay/deployment.yaml", environ={})
    (workers,) = tree["spec"]["workerGroupSpecs"]
    needed = sum(pool.replicas * pool.resources.cpus for pool in worker_pools(config))
    assert int(workers["rayStartParams"]["num-cpus"]) * workers["replicas"] >= needed


def test_the_job_launches_the_file_that_the_head_has() -> None:
    job = yaml.safe_load((RAY / "kuberay/rayjob.yaml").read_text())
    tree, _ = yaml.safe_load_all((RAY / "kuberay/raycluster.yaml").read_text())
    (mount,) = tree["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert f"--config {mount['mountPath']}/deployment.yaml" in job["spec"]["entrypoint"]
    assert job["spec"]["clusterSelector"]["ray.io/cluster"] == tree["metadata"]["name"]
