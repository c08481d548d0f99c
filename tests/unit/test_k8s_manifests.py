"""The manifests in deploy/k8s: each overlay renders, is valid in the oldest and newest Kubernetes, and agrees with
itself: probes, limits, selectors, ports, the configuration inside, and the metrics that scaling is by."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.config import Config, load_config
from pdserve.testing.kubectl import NO_KUBECTL, find_kubectl, render

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy/k8s"
OVERLAYS = ["base", *sorted(f"overlays/{path.name}" for path in (K8S / "overlays").iterdir())]
OLDEST, NEWEST = "1.30", "1.37"
Tree = dict[str, Any]

OF_CRDS = {
    "ScaledObject": ("cloudcoil.models.keda.v1alpha1", "keda.sh/v1alpha1"),
    "Certificate": ("cloudcoil.models.cert_manager.v1", "cert-manager.io/v1"),
    "Issuer": ("cloudcoil.models.cert_manager.v1", "cert-manager.io/v1"),
    "PodMonitor": ("cloudcoil.models.prometheus_operator.v1", "monitoring.coreos.com/v1"),
}
"""Kinds whose CRDs somebody has put into a package."""
OTHER_KINDS: dict[str, tuple[str, set[str], set[str]]] = {
    "DisaggregatedSet": ("disaggregatedset.x-k8s.io/v1", {"roles"}, {"roles", "slices", "placementPolicy"}),
    "InferencePool": (
        "inference.networking.k8s.io/v1",
        {"selector", "targetPorts", "endpointPickerRef"},
        {"selector", "targetPorts", "endpointPickerRef"},
    ),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", {"parentRefs", "rules"}, {"parentRefs", "rules", "hostnames"}),
    "RayCluster": (
        "ray.io/v1",
        {"headGroupSpec"},
        {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"},
    ),
    "RayJob": (
        "ray.io/v1",
        {"entrypoint"},
        {"entrypoint", "clusterSelector", "submissionMode", "backoffLimit", "submitterPodTemplate"},
    ),
}
"""The rest: API version, and which keys `spec` must and may have."""


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tree]]:
    kubectl = find_kubectl(tmp_path_factory.mktemp("kubectl"))
    if kubectl is None:
        pytest.skip(NO_KUBECTL)
    return {overlay: render(kubectl, K8S / overlay) for overlay in OVERLAYS}


def pod_specs(objects: list[Tree]) -> Iterator[tuple[str, Tree]]:
    """Every pod template in whatever kind, as (where, template): anything with `spec.containers`."""

    def walk(where: str, node: Any) -> Iterator[tuple[str, Tree]]:
        if isinstance(node, dict):
            if isinstance(node.get("spec"), dict) and "containers" in node["spec"]:
                yield where, node
            for key, value in node.items():
                yield from walk(f"{where}.{key}", value)
        elif isinstance(node, list):
            for index, value in enumerate(node):
                yield from walk(f"{where}[{index}]", value)

    for each in objects:
        yield from walk(f"{each['kind']}/{each['metadata']['name']}", each)


def of_kind(objects: list[Tree], *kinds: str) -> list[Tree]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: list[Tree], kind: str, name: str) -> Tree:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def config_of(objects: list[Tree], tmp_path: Path) -> Config:
    (config_map,) = [e for e in of_kind(objects, "ConfigMap") if e["metadata"]["name"].startswith("pdserve-config-")]
    path = tmp_path / "pdserve.yaml"
    path.write_text(config_map["data"]["pdserve.yaml"])
    return load_config(path, environ={})


def matches(selector: Tree, labels: Tree) -> bool:
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid_in_the_oldest_and_the_newest_kubernetes(
    rendered: dict[str, list[Tree]], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is inside kinds of others is Kubernetes' own again. Overlays have most objects in common.
    distinct: dict[str, Tree] = {}
    for objects in rendered.values():
        core = [each for each in objects if each["kind"] not in OF_CRDS and each["kind"] not in OTHER_KINDS]
        pods = [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
            for _, template in pod_specs(of_kind(objects, *OTHER_KINDS))
        ]
        assert core
        distinct |= {json.dumps(each, sort_keys=True): each for each in core + pods}
    # It reads megabytes anew for every object otherwise.
    read = kubernetes_validate.utils.schema_contents
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", functools.cache(read))
    for each in distinct.values():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_check_finds_a_misspelt_key(rendered: dict[str, list[Tree]]) -> None:
    deployment = yaml.safe_load(yaml.safe_dump(named(rendered["base"], "Deployment", "pdserve-router")))
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_of_crds_have_only_what_their_crds_know(rendered: dict[str, list[Tree]], overlay: str) -> None:
    for each in of_kind(rendered[overlay], *OF_CRDS):
        module_name, version = OF_CRDS[each["kind"]]
        module = pytest.importorskip(module_name, reason="pip install the cloudcoil models of pyproject.toml")
        assert each["apiVersion"] == version
        model = vars(module)[each["kind"]].model_validate(each)
        known = model.model_dump(by_alias=True, exclude_unset=True, mode="json")
        # The models ignore what they do not know, so it is missing afterwards.
        assert _paths(each) - _paths(known) == set(), each["metadata"]["name"]
    for each in of_kind(rendered[overlay], *OTHER_KINDS):
        version, needed, allowed = OTHER_KINDS[each["kind"]]
        assert each["apiVersion"] == version
        assert needed <= set(each["spec"]) <= allowed, each["metadata"]["name"]


def _paths(node: Any, where: str = "") -> set[str]:
    if isinstance(node, dict):
        return {path for key, value in node.items() for path in _paths(value, f"{where}.{key}")}
    if isinstance(node, list):
        return {path for index, value in enumerate(node) for path in _paths(value, f"{where}[{index}]")}
    return {where}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_restricted_and_bounded(rendered: dict[str, list[Tree]], overlay: str) -> None:
    specs = list(pod_specs(rendered[overlay]))
    assert len(specs) >= 3
    for where, template in specs:
        spec = template["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] >= 10_000, where
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False, where
        assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")), where
        for container in spec["containers"]:
            inner = container["securityContext"]
            assert inner["allowPrivilegeEscalation"] is False and inner["readOnlyRootFilesystem"] is True, where
            assert inner["capabilities"]["drop"] == ["ALL"], where
            assert set(inner["capabilities"].get("add", [])) <= ({"IPC_LOCK"} if overlay == "overlays/rdma" else set())
            for bound in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(container["resources"][bound]), where
            assert re.fullmatch(r"[^:]+:v?\d+\.\d+\.\d+(-[a-z0-9.]+)?", container["image"]), container["image"]
            # KubeRay has probes of its own for Ray's processes.
            if not container["name"].startswith("ray-"):
                assert {"startupProbe", "livenessProbe", "readinessProbe", "lifecycle"} <= set(container), where
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            volumes = {v["name"] for v in spec["volumes"]}
            assert mounts - volumes <= {"data"}, where


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_time_to_drain(rendered: dict[str, list[Tree]], overlay: str, tmp_path: Path) -> None:
    if overlay == "overlays/kuberay":
        pytest.skip("Ray's supervisors drain")
    config = config_of(rendered[overlay], tmp_path)
    sections = {"router": config.router, "prefill": config.prefill, "decode": config.decode}
    for where, template in pod_specs(rendered[overlay]):
        (container,) = template["spec"]["containers"]
        if container["name"] not in sections:
            continue
        grace = template["spec"]["terminationGracePeriodSeconds"]
        stop = container["lifecycle"]["preStop"]
        drain = sections[container["name"]].drain_timeout_s
        if "exec" in stop:
            command = stop["exec"]["command"]
            assert command[:4] == ["pdserve", "drain", "--self", container["name"]], where
            before, drain = float(command[command.index("--timeout") + 1]), 0.0
        else:
            before = stop["sleep"]["seconds"]
        assert before + drain + 15 <= grace, where


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_ports_and_the_configuration_agree(
    rendered: dict[str, list[Tree]], overlay: str, tmp_path: Path
) -> None:
    if overlay == "overlays/kuberay":
        pytest.skip("has no workloads of its own")
    objects = rendered[overlay]
    config = config_of(objects, tmp_path)
    pods = [template for _, template in pod_specs(objects)]
    workloads = of_kind(objects, "Deployment", "StatefulSet")
    for workload in workloads:
        assert matches(workload["spec"]["selector"], workload["spec"]["template"]["metadata"]["labels"])
        assert "app.kubernetes.io/version" not in workload["spec"]["selector"]["matchLabels"]
    names = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    for workload in of_kind(objects, "StatefulSet"):
        assert workload["spec"]["serviceName"] in names
    for service in of_kind(objects, "Service"):
        found = [p for p in pods if matches({"matchLabels": service["spec"]["selector"]}, p["metadata"]["labels"])]
        assert found, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            for pod in found:
                assert _ports(pod)[port["targetPort"]] == port["port"], service["metadata"]["name"]
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert any(matches(budget["spec"]["selector"], pod["metadata"]["labels"]) for pod in pods)
        assert budget["spec"]["maxUnavailable"] == 1
    configured = {
        "router": {"grpc": config.router.listen, "http": f"0.0.0.0:{config.router.http_port}"},
        "prefill": {
            "grpc": config.prefill.listen,
            "metrics": config.prefill.metrics_listen,
            "kv-tcp": f"0.0.0.0:{config.transfer.tcp_port}",
        },
        "decode": {
            "grpc": config.decode.listen,
            "metrics": config.decode.metrics_listen,
            "kv-tcp": f"0.0.0.0:{config.transfer.tcp_port}",
        },
    }
    seen = set()
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        if container["name"] not in configured:
            continue
        seen.add(container["name"])
        ports = _ports(pod)
        assert {name: f"0.0.0.0:{port}" for name, port in ports.items()} == configured[container["name"]]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "grpc" in container[probe]:
                assert container[probe]["grpc"]["port"] == ports["grpc"]
                assert container[probe]["grpc"]["service"] in ("liveness", "readiness")
            else:
                assert container[probe]["exec"]["command"][:3] == ["pdserve", "health", container["name"]]
        for variable in container["env"]:
            if (value := variable.get("value", "")) and variable["name"].endswith("__ADVERTISE"):
                assert value.endswith(f":{ports['grpc']}")
    assert seen == set(configured)


def _ports(pod: Tree) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for c in pod["spec"]["containers"] for port in c["ports"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_network_policies_let_through_what_the_pods_need(rendered: dict[str, list[Tree]], overlay: str) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(rendered[overlay], "NetworkPolicy")}
    if overlay == "overlays/kuberay":
        pytest.skip("has no policies")
    deny = policies["pdserve-default-deny"]
    assert set(deny["policyTypes"]) == {"Ingress", "Egress"} and "ingress" not in deny and "egress" not in deny
    pods = {t["spec"]["containers"][0]["name"]: t for _, t in pod_specs(rendered[overlay])}

    def open_to(source: str, target: str) -> set[int]:
        """Ports of `target` on which policies of both ends let `source` through."""
        ends = []
        for mine, peer, rules, key in ((source, target, "egress", "to"), (target, source, "ingress", "from")):
            allowed: set[int] = set()
            for policy in policies.values():
                if not matches(policy["podSelector"], pods[mine]["metadata"]["labels"]):
                    continue
                for rule in policy.get(rules, []):
                    peers = rule.get(key)
                    if peers is not None and not any(
                        "podSelector" in p and matches(p["podSelector"], pods[peer]["metadata"]["labels"])
                        for p in peers
                    ):
                        continue
                    named_ports = _ports(pods[target])
                    allowed |= {named_ports.get(p["port"], p["port"]) for p in rule.get("ports", [])} or set(
                        named_ports.values()
                    )
            ends.append(allowed)
        return ends[0] & ends[1]

    assert open_to("router", "prefill") >= {50060} and open_to("router", "decode") >= {50070}
    assert open_to("prefill", "decode") >= {50070, 50071} and open_to("decode", "prefill") >= {50060, 50071}
    assert open_to("decode", "decode") >= {50070, 50071}
    assert 9400 not in open_to("router", "decode") and open_to("decode", "router") == set()
    if "redis" in pods:
        assert all(open_to(who, "redis") == {6379} for who in ("router", "prefill", "decode"))


def test_scaling_is_by_metrics_that_exist(rendered: dict[str, list[Tree]]) -> None:
    documented = set(re.findall(r"`(pdserve_[a-z_]+)`", (ROOT / "docs/metrics.md").read_text()))
    used = set()
    for each in of_kind(rendered["overlays/keda"], "ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        assert named(rendered["overlays/keda"], target["kind"], target["name"])
        for trigger in each["spec"]["triggers"]:
            used |= set(re.findall(r"pdserve_[a-z_]+", trigger["metadata"]["query"]))
    assert used and used <= documented


def test_pod_monitors_name_ports_of_pods(rendered: dict[str, list[Tree]]) -> None:
    pods = [template for _, template in pod_specs(rendered["overlays/monitoring"])]
    for monitor in of_kind(rendered["overlays/monitoring"], "PodMonitor"):
        found = [pod for pod in pods if matches(monitor["spec"]["selector"], pod["metadata"]["labels"])]
        assert found
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert all(endpoint["port"] in _ports(pod) for pod in found)


def test_certificates_say_who_has_them(rendered: dict[str, list[Tree]], tmp_path: Path) -> None:
    objects = rendered["overlays/mtls"]
    cluster = config_of(objects, tmp_path).cluster
    for role in ("router", "prefill", "decode", "operator"):
        spec = named(objects, "Certificate", f"pdserve-{role}")["spec"]
        assert [uri.rsplit("/", 1)[0] for uri in spec["uris"]] == [f"pdserve://{cluster}/{role}"]
        assert f"{role}.{cluster}.pdserve" in spec["dnsNames"]
        assert {"server auth", "client auth"} <= set(spec["usages"])


def test_the_deployment_for_ray_is_a_configuration(rendered: dict[str, list[Tree]], tmp_path: Path) -> None:
    (config_map,) = of_kind(rendered["overlays/kuberay"], "ConfigMap")
    path = tmp_path / "deployment.yaml"
    path.write_text(config_map["data"]["deployment.yaml"])
    load_config(path, environ={})
    cluster = named(rendered["overlays/kuberay"], "RayCluster", "pdserve")
    names = [
        v["configMap"]["name"]
        for v in cluster["spec"]["headGroupSpec"]["template"]["spec"]["volumes"]
        if "configMap" in v
    ]
    assert names == [config_map["metadata"]["name"]]
