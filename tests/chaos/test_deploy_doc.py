"""What docs/deploy.md says to type, typed: on a laptop, on one server, and on a Ray cluster of two nodes.

Only selected by its mark. The sections on containers and Kubernetes have tests of their own: test_image_steps.py,
test_k8s_commands.py.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.addresses import free_port
from pdserve.client import Client
from pdserve.errors import PdServeError
from pdserve.testing.process_cluster import wait_until
from pdserve.testing.ranks import wait_gone

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/deploy.md").read_text()
BIN = Path(sys.executable).parent
READY_S = 240.0


def blocks(heading: str) -> list[str]:
    """Fenced blocks of one section, without those of its subsections."""
    section = re.split(r"^#{2,} ", TEXT.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return [block.strip() for block in re.findall(r"```\w*\n(.*?)```", section, re.DOTALL)]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PDSERVE_", "RAY_"))}
    # A machine that does other things as well.
    patience = {"PDSERVE__LOCAL__START_TIMEOUT_S": str(READY_S)}
    return kept | {"PATH": f"{BIN}:{os.environ['PATH']}"} | patience | more


def serves(address: str) -> bool:
    try:
        with Client(address, timeout_s=60) as client:
            return client.generate("The sky is", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    except PdServeError:
        return False


def end(process: subprocess.Popen[Any], number: signal.Signals, within_s: float) -> None:
    process.send_signal(number)
    assert process.wait(within_s) == 0


@pytest.fixture
def no_router() -> None:
    """The documented address has to be free."""
    try:
        free_port("127.0.0.1:50051", "test")
    except PdServeError:
        pytest.skip("something listens on 127.0.0.1:50051")


@pytest.mark.usefixtures("no_router")
def test_the_laptop() -> None:
    (block,) = blocks("Laptop")
    install, up = block.splitlines()
    assert install == "pip install 'pdserve[embedded]'"
    with subprocess.Popen(shlex.split(up), env=environment(), stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        try:
            wait_until(lambda: serves("127.0.0.1:50051"), "it serves", READY_S)
            end(process, signal.SIGINT, 60)
        finally:
            process.kill()


@pytest.mark.usefixtures("no_router")
def test_the_unit_of_one_server(tmp_path: Path) -> None:
    (block,) = blocks("One server")
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(block)
    service = unit["Service"]
    file = tmp_path / "deployment.yaml"
    shutil.copy(ROOT / "deploy/ray/deployment.yaml", file)
    here = {"/opt/pdserve/bin/pdserve": str(BIN / "pdserve"), "/etc/pdserve/deployment.yaml": str(file)}
    if (analyze := shutil.which("systemd-analyze")) is not None:
        text = block.replace("User=pdserve", "User=root").replace(
            "/opt/pdserve/bin/pdserve", here["/opt/pdserve/bin/pdserve"]
        )
        (tmp_path / "pdserve.service").write_text(text)
        done = subprocess.run(
            [analyze, "verify", "--recursive-errors=no", str(tmp_path / "pdserve.service")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "pdserve.service" not in done.stderr, done.stderr
    log = tmp_path / "log"
    command = [here.get(word, word) for word in shlex.split(service["ExecStart"])]
    with log.open("w") as out, subprocess.Popen(command, env=environment(), stdout=out, stderr=out) as process:

        def wait_for(check: Callable[[], bool], what: str) -> None:
            wait_until(lambda: process.poll() is not None or check(), what, READY_S)
            assert process.poll() is None, log.read_text()

        try:
            wait_for(lambda: serves("127.0.0.1:50051"), "it serves")
            file.write_text(file.read_text().replace("max_batch_size: 32", "max_batch_size: 31"))
            subprocess.run(shlex.split(service["ExecReload"].replace("$MAINPID", str(process.pid))), check=True)
            wait_for(lambda: "every process has the new configuration" in log.read_text(), "it is applied")
            assert "decode-1 differs in decode.max_batch_size" in log.read_text()
            assert serves("127.0.0.1:50051")
            end(process, signal.SIGTERM, float(service["TimeoutStopSec"]))
        finally:
            process.kill()


@pytest.fixture
def ray_environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """With a token of our own; ends every process that has it. `ray stop` would end every Ray of the machine."""
    token = tmp_path / "auth_token"
    token.write_text(secrets.token_hex(32))
    # Ray's sockets need a short path.
    directory = Path("/tmp") / f"ray-doc-{secrets.token_hex(3)}"
    mine = environment(
        RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=str(directory),
        RAY_raylet_start_wait_time_s="180",
    )  # fmt: skip
    try:
        yield mine
    finally:
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_AUTH_TOKEN_PATH") == str(token):
                    process.kill()
            except psutil.Error:
                continue
        shutil.rmtree(directory, ignore_errors=True)


def run(command: str, env: Mapping[str, str], *codes: int) -> str:
    """In the shell, as it stands. What it has printed."""
    done = subprocess.run(
        command, shell=True, env=dict(env), capture_output=True, text=True, cwd=ROOT, timeout=2 * READY_S, check=False
    )
    assert done.returncode in (codes or (0,)), f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.usefixtures("no_router")
def test_the_ray_cluster(ray_environment: dict[str, str]) -> None:
    (start,) = blocks("A cluster")
    exports, head, worker = start.splitlines()
    assert {word.partition("=")[0] for word in exports.split()[1:]} == {
        "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness",
    }  # fmt: skip
    port = free_port("127.0.0.1:0", "test")
    # Both on this machine, which Ray would count twice.
    small = "--num-cpus=4 --object-store-memory=100000000 --include-dashboard=false"
    run(f"{head.replace('6379', str(port))} --node-ip-address=127.0.0.1 {small}", ray_environment)
    small = small.rpartition(" ")[0]
    run(f"{worker.replace('HEAD:6379', f'127.0.0.1:{port}')} {small}", ray_environment)
    env = ray_environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    (commands,) = blocks("Launch, look, scale, end")
    dry, launch, status, scale, down = commands.splitlines()
    assert "create decode-1" in run(dry, env)
    run(launch, env)
    found = json.loads(run(f"{status} --json", env))
    assert len(found) == 6 and all(process["phase"] == "ready" for process in found)
    assert serves("127.0.0.1:50051")
    assert "prefill-2" in run(scale, env)
    assert serves("127.0.0.1:50051")
    run(down, env)
    wait_gone([process["pid"] for process in found])
    run(status, env, 2)
