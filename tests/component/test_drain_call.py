"""What `pdserve drain` does to a worker: the call, with the certificate of an operator, and what comes of it there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.config import Config
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
