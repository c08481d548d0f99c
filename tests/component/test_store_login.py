"""Redis that asks who comes: a password, an access control list, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pdserve.client import AsyncClient
from pdserve.config import Config
from pdserve.errors import StoreError
from pdserve.store.client import Store
from pdserve.store.embedded import EmbeddedRedis
from pdserve.store.login import PASSWORD_VARIABLE, StoreLogin
from pdserve.testing.certificates import EXPIRED, Certificates
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.waiting import eventually

PASSWORD = "s3cret with spaces"
RIGHTS = ("~pdserve:*", "resetchannels", "-@all", "+@read", "+@write", "+@scripting", "+@connection", "+time")
"""What SECURITY.md tells operators to give: nothing outside of pdserve's keys, and no administration."""


def put(path: Path, text: str) -> None:
    path.write_text(text)


async def admin(url: str, *commands: tuple[str, ...]) -> None:
    async with Redis.from_url(url, protocol=2) as redis:
        for command in commands:
            await redis.execute_command(*command)


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    return path


async def test_a_wrong_or_missing_password_is_refused_and_never_shown(
    own_redis: EmbeddedRedis, password_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await admin(own_redis.url, ("CONFIG", "SET", "requirepass", PASSWORD))
    with caplog.at_level(logging.DEBUG):
        for text in (None, "wrong-secret"):
            if text is not None:
                put(password_file, text)
            login = None if text is None else StoreLogin(password_file=str(password_file))
            with pytest.raises(StoreError) as caught:
                await Store.connect(own_redis.url, "x", login=login)
            assert "wrong-secret" not in caught.value.message
    assert "wrong-secret" not in caplog.text
    put(password_file, PASSWORD)
    store = await Store.connect(own_redis.url, "x", login=StoreLogin(password_file=str(password_file)))
    await store.aclose()


async def test_a_password_in_the_environment_comes_first(
    own_redis: EmbeddedRedis, password_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admin(own_redis.url, ("CONFIG", "SET", "requirepass", PASSWORD))
    put(password_file, "outdated")
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    store = await Store.connect(own_redis.url, "x", login=StoreLogin(password_file=str(password_file)))
    await store.aclose()


async def test_a_replaced_password_is_taken_up_by_the_next_connection(
    own_redis: EmbeddedRedis, password_file: Path
) -> None:
    await admin(own_redis.url, ("ACL", "SETUSER", "app", "on", f">{PASSWORD}", *RIGHTS))
    login = StoreLogin(username="app", password_file=str(password_file))
    store = await Store.connect(own_redis.url, "x", login=login)
    put(password_file, "next")
    await admin(own_redis.url, ("ACL", "SETUSER", "app", "resetpass", ">next"), ("CLIENT", "KILL", "USER", "app"))

    async def answers() -> bool:
        with contextlib.suppress(StoreError):
            await store.ping()
            return True
        return False

    await eventually(answers, "redis answers again")
    await store.aclose()


async def test_a_cluster_works_as_a_user_with_the_documented_rights_and_no_others(
    own_redis: EmbeddedRedis, password_file: Path, tmp_path: Path
) -> None:
    await admin(own_redis.url, ("ACL", "SETUSER", "app", "on", f">{PASSWORD}", *RIGHTS))
    config: Config = test_config(
        own_redis.url,
        "limited",
        store={"username": "app", "password_file": str(password_file), "poll_s": 0.05, "timeout_s": 2.0},
        model={"path": str(make_tiny_kv(tmp_path / "model"))},
        engine={"threads": 1, "kind": "torch"},
        kv={"num_blocks": 64},
        router={"listen": "127.0.0.1:0"},
    )
    async with InProcessCluster(config, router=True) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=30) as client:
            result = await client.generate(token_ids=[5, 6, 7], max_tokens=4, temperature=0, ignore_eos=True)
            assert len(result.token_ids) == 4
            assert (await client.status()).store_available
            assert (await client.get_request(result.request_id)).request_id == result.request_id
    login = StoreLogin(username="app", password_file=str(password_file))
    store = await Store.connect(own_redis.url, "limited", login=login)
    for command in (("GET", "other"), ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("SHUTDOWN",)):
        with pytest.raises(StoreError, match=r"(?i)no permission"):
            await store.command(*command)
    await store.aclose()


# TLS ------------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def tls_in_front(url: str, certificates: Certificates) -> AsyncIterator[str]:
    """A server that ends mutual TLS and passes everything on to redis; gives its URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    at = certificates.directory
    context.load_cert_chain(at / "public.pem", at / "public-key.pem")
    context.load_verify_locations(certificates.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours, theirs = await asyncio.open_unix_connection(url.removeprefix("unix://"))
        pumps = [asyncio.create_task(pump(reader, theirs)), asyncio.create_task(pump(ours, writer))]
        tasks.update(pumps)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"rediss://localhost:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def login_of(trusted: Certificates, shown: Certificates | None) -> StoreLogin:
    at = None if shown is None else shown.directory
    return StoreLogin(
        ca_file=trusted.ca_file,
        cert_file=None if at is None else str(at / "router.pem"),
        key_file=None if at is None else str(at / "router-key.pem"),
    )


async def test_redis_over_tls_is_checked_in_both_directions(redis_url: str, cluster_name: str, tmp_path: Path) -> None:
    ours, theirs = Certificates(tmp_path / "ours"), Certificates(tmp_path / "theirs")
    async with tls_in_front(redis_url, ours) as url:
        store = await Store.connect(url, cluster_name, login=login_of(ours, ours))
        await store.ping()
        await store.aclose()
        for trusted, shown in ((theirs, ours), (ours, None), (ours, theirs)):
            with pytest.raises(StoreError):
                await Store.connect(url, cluster_name, login=login_of(trusted, shown), timeout_s=1.0)
    await asyncio.to_thread(ours.issue, days=EXPIRED)
    async with tls_in_front(redis_url, ours) as url:
        with pytest.raises(StoreError, match="expired"):
            await Store.connect(url, cluster_name, login=login_of(ours, None), timeout_s=1.0)
