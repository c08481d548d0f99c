"""A whole cluster with mutual TLS, TLS and keys for clients: exact tokens, and certificates that change under load."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pdserve.client import AsyncClient
from pdserve.client.access import Access
from pdserve.errors import UnauthenticatedError
from pdserve.security.api_keys import new_key, read_keys, write_keys
from pdserve.testing.certificates import EXPIRED, Certificates
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, ProcessCluster, wait_until
from pdserve.testing.reference import check_greedy
from pdserve.testing.strangers import (
    Stranger,
    at_http,
    at_metrics,
    at_router,
    at_worker,
    counted,
    logged,
    peer_context,
)
from pdserve.testing.waiting import eventually

PROMPTS = [[7, 30, 41], list(range(3, 90)), list(range(5, 250))]
NUM_TOKENS = 24


class Secured:
    """The cluster and the way in."""

    def __init__(self, cluster: ProcessCluster, certificates: Certificates, key: str, keys_file: Path) -> None:
        self.cluster = cluster
        self.certificates = certificates
        self.key = key
        self.keys_file = keys_file

    def client(self, key: str | None = None) -> AsyncClient:
        return AsyncClient(
            self.cluster.address,
            timeout_s=CALL_TIMEOUT_S,
            tls=self.certificates.client_tls,
            api_key=self.key if key is None else key,
        )

    @property
    def log(self) -> list[dict[str, Any]]:
        """All lines of all processes that are JSON."""
        lines = [line for p in self.cluster.local.processes for line in self.cluster.lines(p.name)]
        return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture(scope="module")
def secured(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("tls")
    certificates = Certificates(directory / "certs")
    entry, key = new_key("tests")
    write_keys(directory / "keys.yaml", [entry])
    cluster = ProcessCluster(
        tiny_model,
        access=Access(certificates.client_tls, key),
        tls=certificates.settings,
        router__keys_file=str(directory / "keys.yaml"),
    )
    with cluster:
        yield Secured(cluster, certificates, key, directory / "keys.yaml")


async def test_a_pair_with_mutual_tls_and_keys_gives_the_tokens_of_transformers(
    secured: Secured, reference_model: Any
) -> None:
    async with secured.client() as client:
        results = [
            await client.generate(token_ids=p, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True) for p in PROMPTS
        ]
    checks = check_greedy(reference_model, PROMPTS, [result.token_ids for result in results])
    assert [check.wrong_step for check in checks] == [None] * len(PROMPTS)
    assert all(result.placement.kv_bytes > 0 for result in results)
    warned = [line for line in secured.log if "without tcp, which would not be encrypted" in line["msg"]]
    assert len(warned) == 2, "both workers say which transports they leave out"


def test_http_speaks_tls_and_wants_a_key(secured: Secured) -> None:
    address = secured.cluster.local.http_address
    body = {"prompt": [7, 30, 41], "max_tokens": 4, "temperature": 0}
    with httpx2.Client(base_url=f"https://{address}", verify=_context(secured), timeout=60) as client:
        assert client.get("/health").status_code == 200
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        client.headers["Authorization"] = f"Bearer {secured.key}"
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4


async def test_certificates_and_keys_are_replaced_under_load_without_a_failed_request(secured: Secured) -> None:
    """Every process takes the new certificates, and goes on with the connections that it has."""
    stop = asyncio.Event()
    num_done = 0

    async def load() -> None:
        nonlocal num_done
        while not stop.is_set():
            # A client of its own each time: a new connection, with whatever certificate the router has then.
            async with secured.client() as client:
                result = await client.generate(token_ids=PROMPTS[1], max_tokens=8, temperature=0.0, ignore_eos=True)
                assert len(result.token_ids) == 8
                num_done += 1

    def num_replaced() -> int:
        return sum(line["msg"] == "certificates were replaced" for line in secured.log)

    def serials() -> bytes:
        return secured.certificates.read("public.pem")

    before = serials()
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(load())
        entry, other = new_key("late")
        await asyncio.to_thread(secured.certificates.issue)
        write_keys(secured.keys_file, [*read_keys(secured.keys_file), entry])
        assert serials() != before
        await asyncio.to_thread(wait_until, lambda: num_replaced() >= 1, "the router has new certificates")
        done = num_done
        await asyncio.to_thread(wait_until, lambda: num_done >= done + 8, "requests go on")

        async def is_known() -> bool:
            try:
                async with secured.client(other) as client:
                    await client.status()
            except UnauthenticatedError:
                return False
            return True

        await eventually(is_known, "the new key is known")
        async with secured.client(other) as client:
            assert len((await client.generate(token_ids=[9], max_tokens=2, ignore_eos=True)).token_ids) == 2
        stop.set()
    write_keys(secured.keys_file, [key for key in read_keys(secured.keys_file) if key.name != "late"])

    async def is_revoked() -> bool:
        try:
            async with secured.client(other) as client:
                await client.status()
        except UnauthenticatedError:
            return True
        return False

    await eventually(is_revoked, "the key that was removed is refused")


def test_no_log_has_a_key_or_a_hash(secured: Secured) -> None:
    lines = "\n".join(line for p in secured.cluster.local.processes for line in secured.cluster.lines(p.name))
    hashes = [key.sha256 for key in read_keys(secured.keys_file)]
    assert secured.key not in lines and not any(found in lines for found in hashes)
    assert not re.search(r"pdk-[0-9a-f]{12}-", lines)


def test_no_port_lets_a_stranger_in_and_each_is_counted_and_logged_once_a_minute(
    secured: Secured, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """O-SEC: the table in SECURITY.md, but for the listeners of KV transports (test_hostile_bytes.py) and redis."""
    ours = secured.certificates
    theirs = Certificates(tmp_path_factory.mktemp("theirs"))
    # Of our authority, in files of their own.
    expired = Certificates(shutil.copytree(ours.directory, tmp_path_factory.mktemp("old") / "certs"), days=EXPIRED)
    _, wrong_key = new_key("nobody")
    local, infos = secured.cluster.local, secured.cluster.infos()
    assert local.http_address is not None, "it has HTTP"
    router = next(p.name for p in local.processes if p.role == "router")
    strangers: dict[tuple[str, str], list[Stranger]] = {
        (router, "grpc"): at_router(secured.cluster.address, ours, theirs, wrong_key),
        (router, "http"): at_http(local.http_address, ours, theirs, wrong_key),
    }
    for name, info in infos.items():
        # A decode worker is drained by no prefill worker, and so on: the wrong role is that of a prefill worker.
        strangers[name, "grpc"] = at_worker(info.address, info.role.value, ours, theirs, expired)
        strangers[name, "metrics"] = at_metrics(local.metrics_addresses[name], ours, theirs, expired)

    def counts(name: str) -> dict[tuple[str, str], int]:
        path, context = f"https://{local.metrics_addresses[name]}/metrics", peer_context(ours, ours)
        headers = {"Authorization": f"Bearer {secured.key}"}
        with httpx2.Client(verify=context, headers=headers, timeout=60) as client:
            return counted(client.get(path).text)

    before = {name: counts(name) for name, _ in strangers}
    wanted: Counter[tuple[str, str, str]] = Counter()
    for (name, port), visitors in strangers.items():
        for stranger in visitors:
            assert stranger.is_refused(), f"{port} of {name} has let in: {stranger.name}"
            wanted[name, port, stranger.reason] += 1

    def missing() -> dict[tuple[str, str, str], int]:
        now = {name: counts(name) for name, _ in strangers}
        return {
            (name, port, reason): number
            for (name, port, reason), number in wanted.items()
            if now[name][port, reason] - before[name][port, reason] < number
        }

    wait_until(lambda: not missing(), "every stranger is counted", 60)
    for name, port in strangers:
        said = logged(secured.cluster.lines(name))
        setting = {"grpc": "listen", "http": "http_port", "metrics": "metrics_listen"}[port]
        for (setting_of, reason), number in said.items():
            # A minute may end in between.
            assert number <= 3, f"{name} says {number} times that it has refused ({reason}) on {setting_of}"
        for reason in {reason for n, p, reason in wanted if (n, p) == (name, port)}:
            assert any(at.endswith(f".{setting}") and why == reason for at, why in said), (name, port, reason)


def _context(secured: Secured) -> Any:
    return ssl.create_default_context(cafile=secured.certificates.ca_file)
