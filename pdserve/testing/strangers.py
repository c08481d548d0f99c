"""Those that a port must not let in: what each of them tries, and how one sees that it was refused."""

from __future__ import annotations

import contextlib
import json
import pickle  # noqa: TID251 - sent, never read
import re
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.security.identity import server_name
from pdserve.testing.certificates import Certificates

TIMEOUT_S: Final = 20.0
HTTP_REQUEST: Final = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
GARBAGE: Final = bytes(range(256)) * 2
PICKLE: Final = pickle.dumps({"x": [1]})
_STATS: Final = {
    "prefill": "/pdserve.rpc.v1.PrefillWorker/GetStats",
    "decode": "/pdserve.rpc.v1.DecodeWorker/GetStats",
    "router": "/pdserve.rpc.v1.Cluster/GetStatus",
}
_LINE: Final = re.compile(r"refused on (.+) \((\w+)\): ")


@dataclass(frozen=True, slots=True)
class Stranger:
    """One of them, at one port."""

    name: str
    reason: str
    """Under which it is to be counted."""
    is_refused: Callable[[], bool]
    """Try it. Whether nothing came of it."""


def bytes_at(address: str | tuple[str, int], data: bytes) -> bytes:
    """What a socket answers to `data` until it closes the connection. A name of an abstract socket begins with NUL."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    answer = b""
    with socket.socket(family) as connection, contextlib.suppress(ConnectionError):
        connection.settimeout(TIMEOUT_S)
        connection.connect(address)
        connection.sendall(data)
        with contextlib.suppress(OSError):  # the other end may have closed it already, and what it said is still there
            connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(4096):
            answer += piece
    return answer


def talkers(address: str) -> list[Stranger]:
    """Who does not even speak TLS. A server that has understood one would answer in HTTP, of either version."""

    def says_nothing(data: bytes) -> Callable[[], bool]:
        return lambda: not _is_http(bytes_at(_tcp(address), data))

    said = {"a pickle": PICKLE, "an HTTP request in the clear": HTTP_REQUEST, "garbage": GARBAGE}
    return [Stranger(name, "handshake", says_nothing(data)) for name, data in said.items()]


def at_worker(
    address: str, role: str, ours: Certificates, theirs: Certificates, expired: Certificates
) -> list[Stranger]:
    """Of the gRPC port of a worker. The three kinds of certificates are good, of another authority, and too old."""
    name = server_name(ours.cluster, role)

    def with_certificate(of: Certificates | None, caller: str = "router") -> grpc.ChannelCredentials:
        if of is None:
            return grpc.ssl_channel_credentials(ours.read("ca.pem"))
        return grpc.ssl_channel_credentials(ours.read("ca.pem"), of.read(f"{caller}-key.pem"), of.read(f"{caller}.pem"))

    def fails(credentials: grpc.ChannelCredentials | None, code: grpc.StatusCode) -> Callable[[], bool]:
        return lambda: grpc_status(address, _STATS[role], credentials, name) is code

    unavailable, denied = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED
    return [
        *talkers(address),
        Stranger("a client in the clear", "handshake", fails(None, unavailable)),
        Stranger("no certificate", "handshake", fails(with_certificate(None), unavailable)),
        Stranger("a certificate of another authority", "handshake", fails(with_certificate(theirs), unavailable)),
        Stranger("an expired certificate", "handshake", fails(with_certificate(expired), unavailable)),
        Stranger("a certificate of another role", "role", fails(with_certificate(ours, "prefill"), denied)),
    ]


def at_router(address: str, ours: Certificates, theirs: Certificates, wrong_key: str) -> list[Stranger]:
    """Of the gRPC port of a router."""
    good = grpc.ssl_channel_credentials(ours.read("ca.pem"))
    other = grpc.ssl_channel_credentials(theirs.read("ca.pem"))

    def fails(
        credentials: grpc.ChannelCredentials | None, code: grpc.StatusCode, key: str | None = None
    ) -> Callable[[], bool]:
        return lambda: grpc_status(address, _STATS["router"], credentials, None, key) is code

    unavailable, unknown = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED
    return [
        *talkers(address),
        Stranger("a client in the clear", "handshake", fails(None, unavailable)),
        Stranger("a client that trusts another authority", "handshake", fails(other, unavailable)),
        Stranger("no key", "no_key", fails(good, unknown)),
        Stranger("a wrong key", "wrong_key", fails(good, unknown, wrong_key)),
    ]


def at_http(address: str, ours: Certificates, theirs: Certificates, wrong_key: str) -> list[Stranger]:
    """Of the HTTP port of a router."""

    def status(ca: Certificates, key: str | None = None) -> int | None:
        return https_status(f"https://{address}/v1/models", ssl.create_default_context(cafile=ca.ca_file), key)

    return [
        *talkers(address),
        Stranger("a client that trusts another authority", "handshake", lambda: status(theirs) is None),
        Stranger("no key", "no_key", lambda: status(ours) == 401),
        Stranger("a wrong key", "wrong_key", lambda: status(ours, wrong_key) == 401),
    ]


def at_metrics(address: str, ours: Certificates, theirs: Certificates, expired: Certificates) -> list[Stranger]:
    """Of the port of a worker's metrics."""

    def is_refused(of: Certificates | None) -> Callable[[], bool]:
        return lambda: https_status(f"https://{address}/metrics", peer_context(ours, of)) is None

    return [
        *talkers(address),
        Stranger("no certificate", "handshake", is_refused(None)),
        Stranger("a certificate of another authority", "handshake", is_refused(theirs)),
        Stranger("an expired certificate", "handshake", is_refused(expired)),
    ]


def at_transport(address: str | tuple[str, int], token: bytes) -> list[Stranger]:
    """Of the listener of a KV transport. `token` is what the transport wants, with a secret that is none."""
    said = {
        "no token": b"",
        "a wrong token": token,
        "a pickle": PICKLE,
        "an HTTP request": HTTP_REQUEST,
        "garbage": GARBAGE,
    }

    def is_closed(data: bytes) -> Callable[[], bool]:
        # At most it says that it does not know this token.
        return lambda: len(bytes_at(address, data)) <= 8

    return [Stranger(name, "token", is_closed(data)) for name, data in said.items()]


def peer_context(trusted: Certificates, shown: Certificates | None) -> ssl.SSLContext:
    """Of somebody who trusts one authority, and shows a certificate of an operator that another one may have issued."""
    context = ssl.create_default_context(cafile=trusted.ca_file)
    context.check_hostname = False
    if shown is not None:
        context.load_cert_chain(shown.directory / "operator.pem", shown.directory / "operator-key.pem")
    return context


def grpc_status(
    address: str, path: str, credentials: grpc.ChannelCredentials | None, name: str | None, key: str | None = None
) -> grpc.StatusCode:
    """How a call ends that has no message."""
    options = [*CHANNEL_OPTIONS, *(() if name is None else (("grpc.ssl_target_name_override", name),))]
    channel = (
        grpc.insecure_channel(address, options=options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options=options)
    )
    metadata = None if key is None else (("authorization", f"Bearer {key}"),)
    with channel:
        try:
            call: Any = channel.unary_unary(path)
            call(b"", timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def https_status(url: str, context: ssl.SSLContext, key: str | None = None) -> int | None:
    """Of a GET; None if there was no answer."""
    request = urllib.request.Request(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except (OSError, ValueError):
        # Of a server that closes the connection after the handshake, TLS 1.3 learns when it reads.
        return None


def counted(metrics: str) -> dict[tuple[str, str], int]:
    """Strangers by port and reason, in what Prometheus is told."""
    lines = re.findall(r"^pdserve_\w+_strangers_total{(.*)} (\S+)$", metrics, re.MULTILINE)
    found = {}
    for labels, value in lines:
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[named["port"], named["reason"]] = int(float(value))
    return found


def logged(lines: Iterable[str]) -> Mapping[tuple[str, str], int]:
    """How many lines of JSON there are of strangers, by port and reason."""
    found: dict[tuple[str, str], int] = {}
    for line in lines:
        match = _LINE.match(json.loads(line)["msg"]) if line.startswith("{") else None
        if match is not None:
            found[match[1], match[2]] = found.get((match[1], match[2]), 0) + 1
    return found


def _is_http(answer: bytes) -> bool:
    """Or frames of HTTP/2, which a gRPC server begins with its settings."""
    return answer.startswith((b"HTTP/", b"\0\0")) and b"400" not in answer[:16]


def _tcp(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)
