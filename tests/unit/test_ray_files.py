"""The files of deploy/ray: what Ray's own checks, which need no network, and ours say of them."""

from __future__ import annotations

import functools
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
KUBERAY = ("ray/kuberay", "k8s/overlays/kuberay")
CLUSTER_KEYS = {
    "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec",
    "headServiceAnnotations", "managedBy", "rayVersion", "suspend", "upgradeStrategy", "workerGroupSpecs",
}  # fmt: skip
HEAD_KEYS = {"enableIngress", "headService", "labels", "rayStartParams", "resources", "serviceType", "template"}
WORKER_KEYS = {
    "groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams",
    "replicas", "resources", "scaleStrategy", "suspend", "template",
}  # fmt: skip
JOB_KEYS = {
    "activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy", "entrypoint", "entrypointNumCpus",
    "entrypointNumGpus", "entrypointResources", "jobId", "managedBy", "metadata", "rayClusterSpec", "runtimeEnvYAML",
    "shutdownAfterJobFinishes", "submissionMode", "submitterConfig", "submitterPodTemplate", "suspend",
    "ttlSecondsAfterFinished",
}  # fmt: skip


def cluster(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((RAY / f"{name}.yaml").read_text()))


def objects(path: str) -> list[dict[str, Any]]:
    """Of a kustomization, before anything is added to them."""
    directory = RAY.parent / path
    resources = yaml.safe_load((directory / "kustomization.yaml").read_text())["resources"]
    files = [directory / name for name in resources if name.endswith(".yaml")]
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


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
    assert tree["spec"]["headGroupSpec"]["labels"] == labels
    (worker,) = tree["spec"]["workerGroupSpecs"]
    grace = worker["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > max(config.prefill.drain_timeout_s, config.decode.drain_timeout_s)


@pytest.mark.parametrize("path", KUBERAY)
def test_the_operator_of_kuberay_takes_the_cluster(path: str) -> None:
    """Keys of its types, and what it refuses although its schema does not."""
    (tree,) = (each for each in objects(path) if each["kind"] == "RayCluster")
    spec = tree["spec"]
    assert len(tree["metadata"]["name"]) <= 63 and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", tree["metadata"]["name"])
    assert {"headGroupSpec"} <= set(spec) <= CLUSTER_KEYS
    for group, keys in [(spec["headGroupSpec"], HEAD_KEYS), *((w, WORKER_KEYS) for w in spec["workerGroupSpecs"])]:
        assert {"rayStartParams", "template"} <= set(group) <= keys
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert "labels" not in group["rayStartParams"]
        sized = {"num-cpus", "num-gpus", "memory", "resources"} & set(group["rayStartParams"])
        assert not sized or not group.get("resources")
        assert group["template"]["spec"].get("restartPolicy") in (None, "Never")
        for container in group["template"]["spec"]["containers"]:
            assert "RAY_REDIS_ADDRESS" not in {variable["name"] for variable in container.get("env", [])}
    for group in spec["workerGroupSpecs"]:
        assert {"groupName", "minReplicas", "maxReplicas"} <= set(group)
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    if spec.get("authOptions", {}).get("mode") == "token":
        assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52, 0)


@pytest.mark.parametrize("path", KUBERAY)
def test_every_node_of_kuberay_runs_workers_at_the_priority_of_others(path: str) -> None:
    """Ray's own default is a niceness of 15."""
    (tree,) = (each for each in objects(path) if each["kind"] == "RayCluster")
    for group in (tree["spec"]["headGroupSpec"], *tree["spec"]["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"], container["name"]


@pytest.mark.parametrize("path", KUBERAY)
def test_the_operator_of_kuberay_takes_the_job(path: str) -> None:
    (tree,) = (each for each in objects(path) if each["kind"] == "RayJob")
    spec = tree["spec"]
    assert set(spec) <= JOB_KEYS
    assert spec["clusterSelector"]["ray.io/cluster"]
    assert spec.get("submissionMode", "K8sJobMode") in ("K8sJobMode", "HTTPMode")
    assert not spec.get("suspend") and not spec.get("shutdownAfterJobFinishes")
    assert spec.get("backoffLimit", 0) >= 0


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_pods_of_the_cluster_are_valid(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    read = kubernetes_validate.utils.schema_contents
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", functools.cache(read))
    tree, service = objects("ray/kuberay")[:2]
    groups = [tree["spec"]["headGroupSpec"], *tree["spec"]["workerGroupSpecs"]]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}
        for group in groups
    ]
    for each in (*pods, service):
        kubernetes_validate.validate(each, version, strict=True)


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
