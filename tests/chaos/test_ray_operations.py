"""A deployment on Ray with all that a production one has: several routers, TLS, GPUs, and a redis of somebody else, for
Ray's own state as well; and what becomes of it when the head is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from pdserve.addresses import free_port
from pdserve.client import Tls
from pdserve.client.access import CA_FILE
from pdserve.ray.health import Health
from pdserve.ray.redis_child import RedisMaker
from pdserve.testing.certificates import Certificates
from pdserve.testing.process_cluster import wait_until
from pdserve.testing.ray_rig import NUM_TOKENS, Deployment, Load, kill, ray_rig
from pdserve.testing.reference import greedy_reference
from pdserve.testing.tiny_models import make_tiny_kv

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

PASSWORD = "of-redis"
RECONNECT_S = 45
"""How long Ray's nodes wait for a head that is gone; Ray's own setting is 60."""
AWAY_S = 12.0
"""How long the head is away in the test in which it comes back."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny-kv")


@contextmanager
def redis_server(password: str) -> Iterator[str]:
    """host:port of one that is not embedded in anything."""
    port = free_port("127.0.0.1:0", "redis")
    child, probe = RedisMaker(host="127.0.0.1", port=port, password=password).start()
    try:
        wait_until(lambda: probe() is Health.READY, "redis answers", 20)
        yield f"127.0.0.1:{port}"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(10)


def load_of(model: Path, address: str, tls: Tls | None = None) -> Load:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 300, int(n)).tolist() for n in rng.integers(20, 80, 6)]
    load = Load(address, prompts, tls=tls)
    load.learn(lambda asked: [output.ids for output in greedy_reference(model, asked, NUM_TOKENS)])
    return load


def environment_of(pid: int) -> dict[str, str]:
    return psutil.Process(pid).environ()


def test_routers_tls_gpus_and_a_redis_of_somebody_else_through_restarts_and_an_absence_of_the_head(
    model: Path, tmp_path: Path
) -> None:
    """With fault tolerance of Ray's head: nothing ends while it is away, no request is lost, and afterwards everything
    can be changed as before."""
    with ExitStack() as stack:
        rays = stack.enter_context(redis_server(""))
        store = stack.enter_context(redis_server(PASSWORD))
        (tmp_path / "password").write_text(PASSWORD)
        fault_tolerance = {
            "RAY_REDIS_ADDRESS": rays,
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
        }
        rig = stack.enter_context(ray_rig(2, cpus=6, gpus=2, environment=fault_tolerance))
        deployment = Deployment(
            rig,
            tmp_path,
            model,
            store={"url": f"redis://{store}/0", "password_file": str(tmp_path / "password")},
            deployment__routers__replicas=2,
        )
        certificates = Certificates(tmp_path / "tls", deployment.tree["cluster"])
        gpus = {"prefill": 1, "decode": 2}
        for pool, number in gpus.items():
            section = deployment.tree["deployment"]["pools"][pool]
            section["replicas"] = 2 if number == 1 else 1
            section["resources"]["gpus"] = number
        deployment.set(tls=certificates.settings)
        access = {CA_FILE: certificates.ca_file}
        deployment.run("launch")
        before = deployment.status()
        assert sorted(before) == ["decode-0", "prefill-0", "prefill-1", "router-0", "router-1"]
        assert all(p["phase"] == "ready" and p["current"] for p in before.values())

        # What a process has been given it sees, and nobody else does.
        seen = {name: environment_of(p["pid"])["CUDA_VISIBLE_DEVICES"] for name, p in before.items()}
        assert {seen["router-0"], seen["router-1"]} == {""}
        assert sorted(seen["decode-0"].split(",")) == ["0", "1"]
        nodes = {name: p["node_id"] for name, p in before.items()}
        assert nodes["prefill-0"] == nodes["prefill-1"] != nodes["decode-0"], "two GPUs are all that a machine has"
        assert {seen["prefill-0"], seen["prefill-1"]} == {"0", "1"}
        assert nodes["router-0"] not in (nodes["prefill-0"], nodes["decode-0"])

        loads = [load_of(model, address, certificates.client_tls) for address in deployment.addresses()]
        with ExitStack() as running:
            for load in loads:
                running.enter_context(load.running(1))
            for load in loads:
                load.wait_for_more(2)
            # Every worker is replaced, by an operator who knows nothing of Ray.
            deployment.run_beside("restart", "--force", "--router", loads[0].address, environment=access)
            deployment.wait_ready(
                "workers are new",
                lambda found: all(found[name]["starts"] == 2 for name in found if "router" not in name),
            )
            restarted = deployment.status()
            rig.stop_head()
            away = time.monotonic()
            while time.monotonic() < away + AWAY_S:
                for load in loads:
                    load.wait_for_more(1)
            rig.start_head()
            deployment.wait_ready("the head knows its own again")
            assert {n: p["pid"] for n, p in deployment.status().items()} == {n: p["pid"] for n, p in restarted.items()}
            assert "nothing to do" in deployment.run("launch").stderr
            kill(restarted["prefill-1"]["pid"])
            deployment.wait_ready("it is started again", lambda found: found["prefill-1"]["starts"] == 3)
            deployment.run("scale", "prefill=1")
            assert "prefill-1" not in deployment.status()
            for load in loads:
                load.wait_for_more(2)
        # Also says that redis has nothing of it that does not end by itself.
        deployment.run("launch", "--down")


def test_without_fault_tolerance_everything_serves_until_ray_gives_up_its_head_and_then_nothing_is_left(
    model: Path, tmp_path: Path
) -> None:
    """Ray's own limit: its nodes end when the head has been away for so long, and take their workers with them."""
    limit_s = 40
    with (
        redis_server(PASSWORD) as store,
        ray_rig(1, cpus=6, environment={"RAY_gcs_rpc_server_reconnect_timeout_s": str(limit_s)}) as rig,
    ):
        (tmp_path / "password").write_text(PASSWORD)
        deployment = Deployment(
            rig, tmp_path, model, store={"url": f"redis://{store}/0", "password_file": str(tmp_path / "password")}
        )
        deployment.run("launch")
        processes = [psutil.Process(p["pid"]) for p in deployment.status().values()]
        load = load_of(model, deployment.address)
        with load.running(1):
            load.wait_for_more(2)
            rig.stop_head()
            lost = time.monotonic()
            while time.monotonic() < lost + limit_s / 2:
                load.wait_for_more(1)
        wait_until(
            lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes),
            "its processes have ended",
            limit_s + 180.0,
        )
