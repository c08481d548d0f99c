"""A Ray cluster of several nodes on this machine, a deployment on it, and a load that must not notice what befalls it.

Nodes are told apart by process: `ray stop` would end every Ray of the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from pdserve.addresses import free_port
from pdserve.client import AsyncClient, Client, Tls
from pdserve.errors import PdServeError
from pdserve.testing.process_cluster import wait_until

START_S = 180.0
"""For processes of a machine that does other things as well."""
NUM_TOKENS = 48
_FAST = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""A lost node is noticed within seconds instead of a quarter of a minute."""


class RayRig:
    """A Ray cluster with token authentication: a head for router and redis, and nodes for workers."""

    def __init__(
        self, num_nodes: int, *, cpus: int, gpus: int = 0, environment: Mapping[str, str] | None = None
    ) -> None:
        """`cpus` and `gpus` are what each of the nodes claims to have, `environment` is further settings of Ray."""
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("PDSERVE_", "RAY_"))}
        self.environment |= {**_FAST, "RAY_AUTH_TOKEN": secrets.token_hex(24), **(environment or {})}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.testing.ray_nodes", str(num_nodes), str(cpus), str(gpus)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment,
        )  # fmt: skip
        try:
            self.address = str(self._answer()["address"])
        except BaseException:
            self.shutdown()
            raise

    def add_node(self) -> None:
        """One more."""
        self._ask("add")

    def kill_node(self, number: int) -> None:
        """SIGKILL everything of it, as when a machine loses its power."""
        assert self._ask(f"kill {number}")["num_killed"] > 0

    def stop_head(self) -> None:
        """SIGKILL what the other nodes know the cluster by."""
        self._ask("stop-head")

    def start_head(self) -> None:
        """Start it again, where it was."""
        self._ask("start-head")

    def shutdown(self) -> None:
        """End it all."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the Ray cluster has ended, see its output on stderr"
        return dict(json.loads(line))


@contextmanager
def ray_rig(
    num_nodes: int, *, cpus: int, gpus: int = 0, environment: Mapping[str, str] | None = None
) -> Iterator[RayRig]:
    """Ends every process of the cluster, however the test ends."""
    rig = RayRig(num_nodes, cpus=cpus, gpus=gpus, environment=environment)
    try:
        yield rig
    finally:
        rig.shutdown()


class Deployment:
    """`pdserve launch` and `pdserve scale` on a rig, as an operator runs them."""

    def __init__(self, rig: RayRig, directory: Path, model: Path, **overrides: Any) -> None:
        """`overrides` are settings, with two underscores for the dot."""
        self._rig = rig
        self._path = directory / "cluster.yaml"
        self.tree: dict[str, Any] = {
            "cluster": f"ray-{secrets.token_hex(4)}",
            "model": {"path": str(model)},
            "engine": {"kind": "torch", "threads": 1},
            "kv": {"num_blocks": 256},
            "router": {"listen": "127.0.0.1:0", "max_attempts": 20, "worker_wait_s": 90.0, "resume_s": 60.0},
            # Prompts are computed by prefill workers.
            "decode": {"local_prefill_tokens_per_step": 0, "drain_timeout_s": 20.0},
            # A worker of a busy test machine is slow long before it is dead.
            "health": {"heartbeat_s": 0.3, "peer_timeout_s": 10.0},
            "local": {"start_timeout_s": START_S},
            "deployment": {
                "redis": {"port": free_port("127.0.0.1:0", "redis")},
                "routers": {"resources": {"labels": {"place": "head"}}},
                "pools": {
                    role: {"role": role, "replicas": 1, "resources": {"labels": {"place": "worker"}}}
                    for role in ("prefill", "decode")
                },
            },
        }
        self.set(**overrides)

    def set(self, **overrides: Any) -> None:
        """Change the file."""
        for name, value in overrides.items():
            node = self.tree
            *parents, leaf = name.split("__")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
        self._path.write_text(yaml.safe_dump(self.tree))

    def run(
        self, *arguments: str, codes: Sequence[int] = (0,), environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`pdserve ...` on the Ray cluster to its end. Raises AssertionError if its exit code is none of `codes`."""
        return self.run_beside(
            *arguments, "--ray-address", self._rig.address, codes=codes, environment=environment or {}
        )

    def run_beside(
        self, *arguments: str, codes: Sequence[int] = (0,), environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """The same for commands that know nothing of Ray, with more variables of the environment."""
        done = subprocess.run(
            [sys.executable, "-m", "pdserve", *arguments, "-c", str(self._path)],
            capture_output=True, text=True, env={**self._rig.environment, **environment}, timeout=2 * START_S,
        )  # fmt: skip
        assert done.returncode in codes, f"{arguments}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def status(self) -> dict[str, dict[str, Any]]:
        """What `pdserve launch --status` says, by process."""
        found = json.loads(self.run("launch", "--status", "--json", codes=(0, 1)).stdout)
        return {process["name"]: process for process in found}

    @property
    def address(self) -> str:
        """host:port of the router."""
        (address,) = self.addresses()
        return address

    def addresses(self) -> list[str]:
        """Those of all routers."""
        return [str(p["addresses"]["grpc"]) for p in self.status().values() if p["role"] == "router"]

    def wait_ready(self, what: str, check: Callable[[dict[str, dict[str, Any]]], bool] = lambda found: True) -> None:
        """Until everything is ready, and `check` of the status holds."""

        def well() -> bool:
            found = self.status()
            return all(p["phase"] == "ready" and p["current"] for p in found.values()) and check(found)

        wait_until(well, what, START_S)


@dataclass
class Load:
    """Streams one after the other, several at a time, whose tokens are compared with those of the first ones."""

    address: str
    prompts: list[list[int]]
    expected: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_done: int = 0
    failures: list[str] = field(default_factory=list)
    tls: Tls | None = None

    def learn(self, reference: Callable[[list[list[int]]], list[tuple[int, ...]]]) -> None:
        """What the streams must say, from somebody else."""
        self.expected = dict(enumerate(reference(self.prompts)))

    @contextmanager
    def running(self, num_streams: int) -> Iterator[None]:
        """While the block runs, and until the last streams have ended. Raises AssertionError for a failure."""
        over = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._run(num_streams, over)), name="load")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(START_S)
        assert not thread.is_alive(), "streams hang"
        assert not self.failures, "; ".join(self.failures)

    def wait_for_more(self, number: int) -> None:
        """Until so many more streams are complete."""
        before = self.num_done
        wait_until(lambda: self.num_done >= before + number or bool(self.failures), "streams complete", START_S)

    async def _run(self, num_streams: int, over: threading.Event) -> None:
        client = AsyncClient(self.address, timeout_s=START_S, tls=self.tls)
        async with client, asyncio.TaskGroup() as group:
            for first in range(num_streams):
                group.create_task(self._stream(client, first, over))

    async def _stream(self, client: AsyncClient, first: int, over: threading.Event) -> None:
        number = first
        while not over.is_set():
            index = number % len(self.prompts)
            number += 1
            try:
                result = await client.generate(
                    token_ids=self.prompts[index], max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
                )
            except PdServeError as error:
                self.failures.append(f"{error.code}: {error.message}")
                return
            self.num_done += 1
            if tuple(result.token_ids) != self.expected[index]:
                self.failures.append(f"prompt {index}: wrong tokens after {result.placement.attempts} attempts")


def kill(pid: int) -> None:
    """SIGKILL, and wait until it has gone."""
    process = psutil.Process(pid)
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def can_serve(address: str) -> bool:
    """Whether a router answers."""
    try:
        with Client(address, timeout_s=5.0) as client:
            client.status()
    except PdServeError:
        return False
    return True
