"""What `pdserve drain` does to a worker: the call, with the certificate of an operator, and what comes of it there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx2
import pytest

from pdserve.config import Config
from pdserve.errors import PermissionDeniedError
from pdserve.launch.rolling import drain_and_stop
from pdserve.testing.certificates import Certificates
from pdserve.testing.cluster import test_config
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_rig import prompt_of, rig

CLUSTER = "drained"


@pytest.fixture
def config(redis_url: str, tmp_path: Path) -> Config:
    """Workers that would finish for a minute, behind mutual TLS."""
    return test_config(
        redis_url,
        CLUSTER,
        tls={"internal": Certificates(tmp_path, CLUSTER).settings["internal"]},
        transfer={"transports": ["grpc"]},
        prefill={"drain_timeout_s": 60.0},
        decode={"drain_timeout_s": 60.0},
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_operator_ends_a_worker_in_less_time_than_its_own_configuration_gives(
    config: Config, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-OPS-3."""
    async with rig(config) as r:
        engine, worker = (
            (r.prefill[0], r.cluster.prefill[0]) if role == "prefill" else (r.decode[0], r.cluster.decode[0])
        )
        stopped = asyncio.Event()
        # In this process SIGTERM would end the tests.
        monkeypatch.setattr(worker.host, "stop_process", stopped.set)
        engine.pause()
        key = await r.submit(prompt_of(30), 30)
        await engine.paused()
        assert await asyncio.to_thread(drain_and_stop, worker.host.info, config, 0.05) == 1
        assert stopped.is_set()
        async with asyncio.timeout(5.0):
            # What SIGTERM leads to: its time has been taken already.
            await worker.drain()
        assert r.router.failure(key) is None
        engine.resume()
        await r.router.finished(key)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_a_time_the_worker_finishes_as_its_own_configuration_says(
    config: Config, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(config) as r:
        engine, worker = (
            (r.prefill[0], r.cluster.prefill[0]) if role == "prefill" else (r.decode[0], r.cluster.decode[0])
        )
        monkeypatch.setattr(worker.host, "stop_process", lambda: None)
        engine.pause()
        key = await r.submit(prompt_of(30), 30)
        await engine.paused()
        call = asyncio.create_task(asyncio.to_thread(drain_and_stop, worker.host.info, config, None))
        await eventually(lambda: worker.stats().draining, "it drains")
        assert not call.done()
        engine.resume()
        assert await call == 0
        await r.router.finished(key)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_certificates_only_its_own_machine_may_drain_a_worker(
    redis_url: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-SEC: whoever reaches the port must not be able to empty the cluster."""
    section: dict[str, object] = {"metrics_listen": "127.0.0.1:0"}
    plain = test_config(redis_url, CLUSTER, transfer={"transports": ["grpc"]}, **{role: section})
    async with rig(plain) as r:
        worker = r.cluster.prefill[0] if role == "prefill" else r.cluster.decode[0]
        monkeypatch.setattr(worker.host, "stop_process", lambda: None)
        monkeypatch.setattr("pdserve.security.local_guard.is_this_machine", lambda peer: False)
        for _ in range(2):
            with pytest.raises(PermissionDeniedError, match=rf"tls.internal only from .* {role}.remote_drain"):
                await asyncio.to_thread(drain_and_stop, worker.host.info, plain, 0.05)
        assert not worker.stats().draining
        async with httpx2.AsyncClient() as client:
            text = (await client.get(f"http://{worker.host.metrics_address}/metrics")).text
        assert re.search(r'^pdserve_worker_strangers_total{.*port="grpc",reason="remote".*} 2.0$', text, re.MULTILINE)
        monkeypatch.undo()
        monkeypatch.setattr(worker.host, "stop_process", lambda: None)
        await asyncio.to_thread(drain_and_stop, worker.host.info, plain, 0.05)
        assert worker.stats().draining


async def test_a_worker_can_be_told_to_let_every_machine_drain_it(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = test_config(redis_url, CLUSTER, transfer={"transports": ["grpc"]}, decode={"remote_drain": True})
    async with rig(plain) as r:
        worker = r.cluster.decode[0]
        monkeypatch.setattr(worker.host, "stop_process", lambda: None)
        monkeypatch.setattr("pdserve.security.local_guard.is_this_machine", lambda peer: False)
        await asyncio.to_thread(drain_and_stop, worker.host.info, plain, 0.05)
        assert worker.stats().draining
