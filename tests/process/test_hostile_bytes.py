"""Pickles and other programs in the disguise of data, sent to every port and store of a running cluster (O-SEC)."""

from __future__ import annotations

import asyncio
import contextlib
import pickle  # noqa: TID251 - sent, and read only to see that it would have worked
import socket
from pathlib import Path

import grpc
import httpx2
import psutil
import pytest
from redis import Redis

from kv_transfer.transports.local_wire import Greeting, Mode
from kv_transfer.transports.tcp_opening import Credentials
from pdserve.client import Client
from pdserve.errors import PdServeError
from pdserve.rpc.v1 import handoff_pb2, inference_pb2, prefix_pb2, worker_pb2
from pdserve.store.keys import Keyspace
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, ProcessCluster, wait_until
from pdserve.testing.strangers import Stranger, at_transport, counted

PROMPT = [7, 30, 41]


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return Path.touch, (self._path,)


def payloads(mark: Path) -> list[bytes]:
    """Every protocol of pickle, and what some loaders take for code."""
    pickles = [pickle.dumps(_Bomb(mark), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    text = f"__import__('pathlib').Path({str(mark)!r}).touch()".encode()
    yaml = f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{mark}']]".encode()
    return [*pickles, text, yaml, b"{{ cycler.__init__.__globals__ }}"]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def listeners(cluster: ProcessCluster) -> dict[str, set[int]]:
    """TCP ports by process."""
    return {
        process.name: {
            connection.laddr.port
            for connection in psutil.Process(process.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        for process in cluster.local.processes
    }


def abstract_sockets(pid: int) -> set[str]:
    """Names that a process listens on; each begins with NUL."""
    found = [str(connection.laddr) for connection in psutil.Process(pid).net_connections("unix")]
    return {"\0" + name[1:] for name in found if name.startswith(("@", "\0"))}


def send(address: str | tuple[str, int], data: bytes) -> None:
    """Whatever the other side makes of it."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as connection, contextlib.suppress(OSError):
        connection.settimeout(2)
        connection.connect(address)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            continue


def methods() -> list[str]:
    """Every method of every service of ours, and the one that has no definition."""
    files = [module.DESCRIPTOR for module in (handoff_pb2, inference_pb2, prefix_pb2, worker_pb2)]
    services = [service for file in files for service in file.services_by_name.values()]
    return [f"/{s.full_name}/{m.name}" for s in services for m in s.methods] + ["/pdserve.rpc.v1.KvData/Push"]


def assert_serves(cluster: ProcessCluster, mark: Path) -> None:
    """Nothing was executed, nobody has ended, and the answer is what it was."""
    assert not mark.exists()
    cluster.assert_alive()
    result = cluster.client.generate(token_ids=PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True)
    assert len(result.token_ids) == 6


def test_the_bombs_would_go_off(mark: Path) -> None:
    pickle.loads(payloads(mark)[0])
    assert mark.exists()


def test_every_listening_socket_takes_a_pickle_for_nonsense(one_pair: ProcessCluster, mark: Path) -> None:
    found = listeners(one_pair)
    # Router: gRPC and HTTP. Workers: gRPC, metrics, and the KV transport tcp.
    assert [len(ports) >= number for ports, number in zip(found.values(), (2, 3, 3), strict=True)] == [True] * 3
    for ports in found.values():
        for port in sorted(ports):
            for data in payloads(mark):
                send(("127.0.0.1", port), data)
    names = {name for process in one_pair.local.processes for name in abstract_sockets(process.pid)}
    assert names, "the transport `local` listens on an abstract socket"
    for name in names:
        for data in payloads(mark):
            send(name, data)
    assert_serves(one_pair, mark)


def test_listeners_of_kv_transports_let_no_stranger_in_and_count_and_log_each(one_pair: ProcessCluster) -> None:
    """O-SEC: the rows of the table in SECURITY.md that test_security.py has no ports for."""
    infos, local = one_pair.infos(), one_pair.local
    visitors: dict[tuple[str, str], list[Stranger]] = {}
    for process in local.processes:
        if process.name not in infos:
            continue
        own = {int(a.rsplit(":", 1)[1]) for a in (infos[process.name].address, local.metrics_addresses[process.name])}
        (port,) = listeners(one_pair)[process.name] - own
        token = Credentials.fresh().opening()
        visitors[process.name, "tcp"] = at_transport(("127.0.0.1", port), token)
        greeting = Greeting(Mode.STREAM, bytes(32), 0, bytes(32)).pack()
        (name,) = abstract_sockets(process.pid)
        visitors[process.name, "local"] = at_transport(name, greeting)

    def counts(name: str) -> dict[tuple[str, str], int]:
        return counted(httpx2.get(f"http://{local.metrics_addresses[name]}/metrics", timeout=20).text)

    before = {name: counts(name) for name in infos}
    for (name, transport), strangers in visitors.items():
        for stranger in strangers:
            assert stranger.is_refused(), f"{transport} of {name} has let in: {stranger.name}"

    def missing() -> list[tuple[str, str]]:
        return [
            (name, transport)
            for (name, transport), strangers in visitors.items()
            if counts(name)[transport, "token"] - before[name][transport, "token"] < len(strangers)
        ]

    wait_until(lambda: not missing(), "every stranger is counted")
    for name, transport in visitors:
        said = [line for line in one_pair.lines(name) if f"refused on the KV transport {transport} (token)" in line]
        # A minute may end in between.
        assert 1 <= len(said) <= 3


async def test_every_grpc_method_takes_a_pickle_for_nonsense(one_pair: ProcessCluster, mark: Path) -> None:
    addresses = [one_pair.address, *(info.address for info in one_pair.infos().values())]
    refused = 0
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            for method in methods():
                for data in payloads(mark):
                    call = channel.stream_stream(method)(iter([data]), timeout=5)
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await asyncio.wait_for(call.read(), 5)
                    call.cancel()
                    refused += 1
    assert refused == len(addresses) * len(methods()) * len(payloads(mark))
    await asyncio.to_thread(assert_serves, one_pair, mark)


def test_http_bodies_and_fields_take_a_pickle_for_nonsense(one_pair: ProcessCluster, mark: Path) -> None:
    with httpx2.Client(base_url=f"http://{one_pair.local.http_address}", timeout=20) as client:
        for data in payloads(mark):
            for kind in ("application/json", "application/octet-stream", "application/x-python-pickle"):
                for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                    answer = client.post(path, content=data, headers={"Content-Type": kind})
                    assert 400 <= answer.status_code < 500
            text = data.decode("latin-1")
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert_serves(one_pair, mark)


def test_values_in_redis_take_a_pickle_for_nonsense(one_pair: ProcessCluster, mark: Path) -> None:
    """A worker and a record that somebody else has written there."""
    keys = Keyspace(one_pair.config.cluster)
    with Redis.from_url(one_pair.local.redis_url) as redis:
        for index, data in enumerate(payloads(mark)):
            for name in (f"{keys.prefix}worker:bad{index}", f"{keys.prefix}req:bad{index}"):
                redis.hset(name, mapping={b"info": data, b"state": data, b"incarnation": data, data: data})
                redis.expire(name, 5)
            # Among those that routers look up at every poll.
            redis.zadd(keys.workers, {f"bad{index}": 4e12})
        with Client(one_pair.address, timeout_s=CALL_TIMEOUT_S) as client:
            for index in range(len(payloads(mark))):
                with contextlib.suppress(PdServeError):
                    client.get_request(f"bad{index}")
        assert_serves(one_pair, mark)
        redis.zrem(keys.workers, *(f"bad{index}" for index in range(len(payloads(mark)))))
        redis.delete(*redis.keys(f"{keys.prefix}*bad*"))
