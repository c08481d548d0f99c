"""The commands of the pods in deploy/k8s, run here with the rendered configuration: they become ready by the probes'
names, and the preStop hook of a worker, followed by SIGTERM, loses no request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from pdserve.addresses import free_port
from pdserve.client import Client
from pdserve.config import load_config
from pdserve.errors import PdServeError
from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.kubectl import NO_KUBECTL, find_kubectl, render
from pdserve.testing.process_cluster import wait_until

pytestmark = pytest.mark.timeout(240)

BASE = Path(__file__).parents[2] / "deploy/k8s/base"
READY_S = 120.0
PASSWORD = "of-the-secret"


class Pods:
    """Containers of the rendered base, as processes on free ports of this machine."""

    def __init__(self, objects: list[dict[str, Any]], directory: Path, redis_url: str, model: Path) -> None:
        (config_map,) = [o for o in objects if o["metadata"]["name"].startswith("pdserve-config-")]
        self._config = directory / "pdserve.yaml"
        self._config.write_text(config_map["data"]["pdserve.yaml"])
        load_config(self._config, environ={})
        (directory / "password").write_text(PASSWORD)
        self._containers = {
            o["spec"]["template"]["spec"]["containers"][0]["name"]: o["spec"]["template"]["spec"]["containers"][0]
            for o in objects
            if o["kind"] in ("Deployment", "StatefulSet")
        }
        # What differs here: one address for all, this test's redis and model, and an engine that loads at once.
        self._here = {
            "PDSERVE__STORE__URL": redis_url,
            "PDSERVE__STORE__PASSWORD_FILE": str(directory / "password"),
            "PDSERVE__MODEL__PATH": str(model),
            "PDSERVE__ENGINE__KIND": "torch",
            "PDSERVE__ENGINE__THREADS": "1",
            "PDSERVE__KV__POOL_BYTES": "64MiB",
            "PDSERVE__TRANSFER__TCP_PORT": "0",
            "PDSERVE__HEALTH__PEER_TIMEOUT_S": "15",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environments: dict[str, dict[str, str]] = {}
        self.ports: dict[str, int] = {}

    def start(self, role: str, ordinal: int) -> None:
        name, upper = f"pdserve-{role}-{ordinal}", role.upper()
        container = self._containers[role]
        port = self.ports[name] = free_port("127.0.0.1:0", "test")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE")}
        for variable in container["env"]:
            value = variable.get("value", "").replace("$(POD_NAME)", name)
            environment[variable["name"]] = value or name
        environment |= self._here | {f"PDSERVE__{upper}__LISTEN": f"127.0.0.1:{port}"}
        environment.pop("PDSERVE_CACHE_DIR", None)
        if role == "router":
            environment["PDSERVE__ROUTER__HTTP_PORT"] = "null"
        else:
            environment |= {
                f"PDSERVE__{upper}__ADVERTISE": f"127.0.0.1:{port}",
                f"PDSERVE__{upper}__METRICS_LISTEN": "127.0.0.1:0",
            }
        self._environments[name] = environment
        self.processes[name] = subprocess.Popen(
            self._here_command(container["command"]),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def probe(self, name: str, role: str, kind: str) -> bool:
        """As the kubelet does, with the service that the manifest names."""
        service = self._containers[role][kind]["grpc"]["service"]
        return self._run(name, ["pdserve", "health", role, "--service", service, "--config", "CONFIG"]) == 0

    def pre_stop(self, name: str, role: str) -> int:
        return self._run(name, self._containers[role]["lifecycle"]["preStop"]["exec"]["command"])

    def _run(self, name: str, command: list[str]) -> int:
        return subprocess.run(
            self._here_command(command), env=self._environments[name], capture_output=True, check=False
        ).returncode

    def _here_command(self, command: list[str]) -> list[str]:
        assert command[0] == "pdserve"
        paths = {"/etc/pdserve/pdserve.yaml": str(self._config), "CONFIG": str(self._config)}
        return [sys.executable, "-m", "pdserve", *(paths.get(word, word) for word in command[1:])]


@pytest.fixture
def pods(tmp_path: Path, tiny_model: Path) -> Iterator[Pods]:
    kubectl = find_kubectl(tmp_path)
    if kubectl is None:
        pytest.skip(NO_KUBECTL)
    with ExitStack() as stack:
        server = EmbeddedRedis()
        stack.callback(server.close)
        server.start()
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", PASSWORD)
        pods = Pods(render(kubectl, BASE), tmp_path, server.url, tiny_model)
        try:
            yield pods
        finally:
            for process in pods.processes.values():
                process.kill()
                process.wait()


def test_pods_become_ready_and_one_of_each_kind_is_replaced_without_a_failed_request(pods: Pods) -> None:
    names = {f"pdserve-{role}-{i}": role for role in ("prefill", "decode") for i in (0, 1)}
    for name, role in names.items():
        pods.start(role, int(name[-1]))
    pods.start("router", 0)
    names["pdserve-router-0"] = "router"
    for name, role in names.items():
        wait_until(lambda n=name, r=role: pods.probe(n, r, "readinessProbe"), f"{name} is ready", READY_S)  # type: ignore[misc]
        assert pods.probe(name, role, "livenessProbe")
    outcomes: list[str] = []
    stopping = threading.Event()
    with Client(f"127.0.0.1:{pods.ports['pdserve-router-0']}", timeout_s=90) as client:

        def load(seed: int) -> None:
            while not stopping.is_set():
                try:
                    result = client.generate(token_ids=[1, 5, 9, seed], max_tokens=24, ignore_eos=True)
                    outcomes.append("ok" if len(result.token_ids) == 24 else f"{len(result.token_ids)} tokens")
                except PdServeError as error:
                    outcomes.append(error.message)

        threads = [threading.Thread(target=load, args=(seed,)) for seed in (11, 12, 13, 14)]
        for thread in threads:
            thread.start()
        try:
            for role in ("prefill", "decode"):
                name, before = f"pdserve-{role}-1", len(outcomes)
                wait_until(lambda n=before: len(outcomes) > n + 4, "requests are answered", 60)  # type: ignore[misc]
                assert pods.pre_stop(name, role) == 0
                assert pods.probe(name, role, "livenessProbe") and not pods.probe(name, role, "readinessProbe")
                begin = time.monotonic()
                pods.processes[name].send_signal(signal.SIGTERM)
                assert pods.processes[name].wait(60) == 0
                assert time.monotonic() - begin < 30
                now = len(outcomes)
                wait_until(lambda n=now: len(outcomes) > n + 4, "the other one goes on", 60)  # type: ignore[misc]
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
    assert set(outcomes) == {"ok"}, [outcome for outcome in outcomes if outcome != "ok"]
