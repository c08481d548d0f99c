"""Strangers at every port: in the clear, from another authority, expired, in the wrong role, without a key."""

from __future__ import annotations

import contextlib
import logging
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kv_transfer.transports.grpc_raw import PUSH
from pdserve.config import Config
from pdserve.rpc.v1 import prefix_pb2, prefix_pb2_grpc, worker_pb2, worker_pb2_grpc
from pdserve.testing.certificates import EXPIRED, Certificates
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.fake_engine import FakeEngines, expected
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_rig import prompt_of, rig

REFUSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED)
CLUSTER = "secured"
WORKERS = ("prefill", "decode")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ours"), CLUSTER)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The same names from another authority."""
    return Certificates(tmp_path_factory.mktemp("theirs"), CLUSTER)


@pytest.fixture(scope="module")
def expired(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """From our authority, and too old."""
    directory = tmp_path_factory.mktemp("expired")
    for name in ("ca.pem", "ca-key.pem"):
        (directory / name).write_bytes(certificates.read(name))
    return Certificates(directory, CLUSTER, days=EXPIRED)


@pytest.fixture
def config(redis_url: str, certificates: Certificates) -> Config:
    """Only `grpc` moves KV, so that all of it goes through mutual TLS."""
    return test_config(
        redis_url,
        CLUSTER,
        tls={"internal": certificates.settings["internal"]},
        transfer={"transports": ["grpc"]},
        prefill={"metrics_listen": "127.0.0.1:0"},
        decode={"metrics_listen": "127.0.0.1:0"},
    )


@pytest.fixture
async def cluster(config: Config) -> AsyncIterator[InProcessCluster]:
    async with InProcessCluster(config, prefill_engines=[FakeEngines()], decode_engines=[FakeEngines()]) as cluster:
        yield cluster


def put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


async def call_stats(channel: grpc.aio.Channel, role: str) -> None:
    """A harmless call that only routers and operators may make."""
    stub = worker_pb2_grpc.PrefillWorkerStub if role == "prefill" else worker_pb2_grpc.DecodeWorkerStub
    await stub(channel).GetStats(worker_pb2.GetStatsRequest(), timeout=5)  # type: ignore[call-overload]


async def refusal_of(channel: grpc.aio.Channel, role: str) -> grpc.StatusCode:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_stats(channel, role)
    return caught.value.code()


def worker_of(cluster: InProcessCluster, role: str) -> Any:
    return (cluster.prefill if role == "prefill" else cluster.decode)[0]


async def counted(worker: Any, reason: str, port: str = "grpc") -> int:
    """As Prometheus reads it."""
    async with httpx2.AsyncClient(verify=scraper(worker)) as client:
        text = (await client.get(f"https://{worker.host.metrics_address}/metrics")).text
    pattern = rf'^pdserve_worker_strangers_total{{.*port="{port}",reason="{reason}".*}} (\S+)$'
    return int(float(re.findall(pattern, text, re.MULTILINE)[0]))


def scraper(worker: Any) -> ssl.SSLContext:
    """What Prometheus would use: the certificate of an operator."""
    files = worker.host.config.tls.internal
    context = ssl.create_default_context(cafile=files.ca_file)
    context.check_hostname = False
    context.load_cert_chain(*(name.replace("{role}", "operator") for name in (files.cert_file, files.key_file)))
    return context


@pytest.mark.parametrize("role", WORKERS)
async def test_strangers_cannot_open_a_worker_and_are_logged_once_and_counted(
    role: str,
    cluster: InProcessCluster,
    certificates: Certificates,
    strangers: Certificates,
    expired: Certificates,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """O-SEC: plaintext, no certificate, another authority, expired. Each twice: one line, eight counts."""
    worker = worker_of(cluster, role)
    address = worker.host.info.address

    def attempts() -> list[grpc.aio.Channel]:
        ca_only = grpc.ssl_channel_credentials(certificates.read("ca.pem"))
        name = (("grpc.ssl_target_name_override", f"{role}.secured.pdserve"), ("grpc.use_local_subchannel_pool", 1))
        return [
            grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]),
            grpc.aio.secure_channel(address, ca_only, options=name),
            strangers.channel(address, "router", server=role, trusting=certificates),
            expired.channel(address, "router", server=role, trusting=certificates),
        ]

    with caplog.at_level(logging.WARNING, "pdserve.security.refusals"):
        for channel in (*attempts(), *attempts()):
            assert await refusal_of(channel, role) is grpc.StatusCode.UNAVAILABLE
        async with certificates.channel(address, "operator", server=role) as channel:
            await call_stats(channel, role)

        async def all_counted() -> bool:
            # gRPC may connect more than once before it gives a call up.
            return await counted(worker, "handshake") >= 8

        await eventually(all_counted, "every attempt is counted")
        assert await counted(worker, "role") == 0
    lines = [record for record in caplog.records if "handshake" in record.getMessage()]
    assert len(lines) == 1
    assert f"{role}.listen" in lines[0].getMessage()


@pytest.mark.parametrize(
    ("server", "caller"),
    [(s, c) for s in WORKERS for c in ("prefill", "decode")] + [("prefill", "operator"), ("decode", "operator")],
)
async def test_a_certificate_of_another_role_opens_no_session(
    server: str, caller: str, cluster: InProcessCluster, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    worker = worker_of(cluster, server)
    async with certificates.channel(worker.host.info.address, caller, server=server) as channel:
        stub = worker_pb2_grpc.PrefillWorkerStub if server == "prefill" else worker_pb2_grpc.DecodeWorkerStub
        for _ in range(2):
            call = stub(channel).Session()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert f"pdserve://secured/{caller}/{caller}" in (caught.value.details() or "")
    assert await counted(worker, "role") == 2
    assert sum("may not call" in record.getMessage() for record in caplog.records if record.levelname == "WARNING") == 1


@pytest.mark.parametrize("caller", ["router", "operator"])
async def test_nobody_but_workers_moves_kv(caller: str, cluster: InProcessCluster, certificates: Certificates) -> None:
    address = cluster.decode[0].host.info.address
    async with certificates.channel(address, caller, server="decode") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(PUSH)(iter([b"x"]))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefix_pb2_grpc.PrefixStoreStub(channel).Fetch(prefix_pb2.FetchRequest())
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_worker_that_answers_in_anothers_place_is_not_trusted(
    cluster: InProcessCluster, certificates: Certificates
) -> None:
    """The caller looks, too: a prefill worker is no decode worker."""
    address = cluster.prefill[0].host.info.address
    assert await refusal_of(certificates.channel(address, "router", server="decode"), "prefill") in REFUSED


async def test_health_is_open_to_every_process_of_the_cluster(
    cluster: InProcessCluster, certificates: Certificates
) -> None:
    async with certificates.channel(cluster.decode[0].host.info.address, "operator", server="decode") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("role", WORKERS)
async def test_metrics_of_workers_want_a_certificate(
    role: str, cluster: InProcessCluster, certificates: Certificates, strangers: Certificates
) -> None:
    worker = worker_of(cluster, role)
    address = worker.host.metrics_address
    async with httpx2.AsyncClient() as client:
        with pytest.raises(httpx2.HTTPError):
            await client.get(f"http://{address}/metrics")
    context = ssl.create_default_context(cafile=certificates.ca_file)
    context.check_hostname = False
    context.load_cert_chain(strangers.directory / "router.pem", strangers.directory / "router-key.pem")
    async with httpx2.AsyncClient(verify=context) as client:
        with pytest.raises(httpx2.HTTPError):
            await client.get(f"https://{address}/metrics")

    async def both_counted() -> bool:
        return await counted(worker, "handshake", "metrics") == 2

    await eventually(both_counted, "both are counted")


async def test_kv_and_tokens_pass_between_processes_with_certificates(config: Config) -> None:
    """Hand-off over `grpc` with mutual TLS, driven by a router's certificate."""
    async with rig(config) as r:
        key = await r.submit(prompt_of(40))
        await r.router.finished(key)
        assert r.router.output(key) == expected(prompt_of(40), 8)


async def test_another_authority_takes_over_while_requests_run(
    redis_url: str, cluster_name: str, tmp_path: Path
) -> None:
    """Old and new are trusted at first, then the certificates change; no process starts again and no request fails."""
    old, new = Certificates(tmp_path / "old", cluster_name), Certificates(tmp_path / "new", cluster_name)
    config = test_config(
        redis_url, cluster_name, tls={"internal": old.settings["internal"]}, transfer={"transports": ["grpc"]}
    )
    async with rig(config) as r:
        await r.works()
        address = r.cluster.decode[0].host.info.address
        assert await refusal_of(new.channel(address, "operator", server="decode"), "decode") in REFUSED
        stream = await r.submit(prompt_of(30), 120)
        both = old.read("ca.pem") + new.read("ca.pem")
        put(old.directory / "ca.pem", both)
        for name in ("prefill", "decode", "router"):
            for file in (f"{name}-key.pem", f"{name}.pem"):
                put(old.directory / file, new.read(file))

        async def trusted() -> bool:
            async with new.channel(address, "operator", server="decode") as channel:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call_stats(channel, "decode")
                    return True
            return False

        await eventually(trusted, "whoever trusts only the new authority gets through")
        await r.router.finished(stream)
        assert r.router.output(stream) == expected(prompt_of(30), 120)
        await r.works()
