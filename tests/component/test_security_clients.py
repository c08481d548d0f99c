"""A router's ports with TLS and keys: who is refused, how that looks, what is counted, and what may be replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import AsyncClient, RetryPolicy, Tls
from pdserve.errors import ConfigError, NotFoundError, OverloadedError, UnauthenticatedError, UnavailableError
from pdserve.security.api_keys import ApiKey, new_key, read_keys, write_keys
from pdserve.store.client import Store
from pdserve.testing.certificates import EXPIRED, Certificates
from pdserve.testing.http_rig import RawClient, make_chat_model
from pdserve.testing.router_rig import PROMPT, RouterRigs, expected, make_config
from pdserve.testing.waiting import eventually
from router.http.operations import OPERATIONS
from router.service import RouterService

NO_RETRIES = RetryPolicy(max_attempts=1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Of its own for each test, as some replace them."""
    return Certificates(tmp_path / "certs")


@dataclass
class Guarded:
    """A router with one worker of each kind, and the ways in."""

    router: RouterService
    certificates: Certificates
    keys_file: Path
    key: str

    def client(self, key: str | None, tls: Tls | None = None) -> AsyncClient:
        """Tries nothing twice."""
        tls = tls or self.certificates.client_tls
        return AsyncClient(self.router.address, tls=tls, api_key=key, timeout_s=10, retry=NO_RETRIES)

    def http(self, key: str | None = None, ca: Certificates | None = None) -> httpx2.AsyncClient:
        context = ssl.create_default_context(cafile=(ca or self.certificates).ca_file)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx2.AsyncClient(
            base_url=f"https://{self.router.http_address}", verify=context, headers=headers, timeout=10
        )

    async def generate(self, key: str | None, tls: Tls | None = None, max_tokens: int = 5) -> list[int]:
        async with self.client(key, tls) as client:
            return list((await client.generate(token_ids=PROMPT, max_tokens=max_tokens, temperature=0)).token_ids)

    async def counted(self, port: str, reason: str) -> int:
        """As Prometheus reads it."""
        async with self.http(self.key) as client:
            text = (await client.get("/metrics")).text
        pattern = rf'^pdserve_router_strangers_total{{port="{port}",reason="{reason}"}} (\S+)$'
        return int(float(re.findall(pattern, text, re.MULTILINE)[0]))


@pytest.fixture
async def guarded(
    store: Store, redis_url: str, model_path: Path, certificates: Certificates, tmp_path: Path
) -> AsyncIterator[Guarded]:
    keys_file = tmp_path / "keys.yaml"
    entry, key = new_key("ours")
    write_keys(keys_file, [entry])
    fleet = RouterRigs(store, redis_url, model_path).new_fleet()
    config = make_config(redis_url, store.keys.cluster, model_path, keys_file=str(keys_file))
    settings = config.model_dump() | {"tls": {"public": certificates.settings["public"]}}
    router = RouterService(type(config).model_validate(settings))
    try:
        await fleet.add_prefill("p0")
        await fleet.add_decode("d0")
        await router.start()
        await eventually(lambda: router.pool.has_usable_pair, "a pair is ready")
        yield Guarded(router, certificates, keys_file, key)
    finally:
        await router.stop()
        await fleet.aclose()


def warnings(caplog: pytest.LogCaptureFixture, reason: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if f"({reason})" in r.getMessage()]


async def test_a_client_with_a_key_is_served_over_both_apis(guarded: Guarded) -> None:
    assert await guarded.generate(guarded.key) == expected(5)
    async with guarded.http(guarded.key) as client:
        answer = await client.post("/v1/completions", json={"prompt": list(PROMPT), "max_tokens": 5, "temperature": 0})
    assert answer.json()["usage"]["completion_tokens"] == 5


async def test_a_request_is_there_for_the_key_that_made_it_only(guarded: Guarded) -> None:
    entry, other = new_key("others")
    write_keys(guarded.keys_file, [*read_keys(guarded.keys_file), entry])

    async def other_is_known() -> bool:
        async with guarded.http(other) as client:
            return (await client.get("/v1/models")).status_code == 200

    await eventually(other_is_known, "the other key is known")
    asked = {"prompt": list(PROMPT), "max_tokens": 5, "temperature": 0, "request_id": "mine", "resumable": True}
    async with guarded.client(guarded.key) as ours, guarded.client(other) as theirs:
        await ours.generate(token_ids=PROMPT, max_tokens=5, temperature=0, request_id="ours")
        assert list((await ours.attach("ours").result()).token_ids) == expected(5)
        with pytest.raises(NotFoundError):
            await theirs.attach("ours").result()
        with pytest.raises(NotFoundError):
            await theirs.get_request("ours")
        assert not await theirs.cancel("ours")
    async with guarded.http(guarded.key) as ours, guarded.http(other) as theirs:
        assert (await ours.post("/v1/completions", json=asked)).status_code == 200
        assert (await theirs.post("/v1/completions", json=asked)).status_code == 409
        for method, path in (("GET", "mine"), ("GET", "mine/events"), ("DELETE", "mine")):
            assert (await theirs.request(method, f"/v1/requests/{path}")).status_code == 404, (method, path)
        assert (await ours.get("/v1/requests/mine")).json()["completion_tokens"] == 5


@pytest.mark.parametrize(("key", "reason"), [(None, "no_key"), ("wrong", "wrong_key")])
async def test_grpc_without_a_good_key_is_refused_logged_once_and_counted(
    key: str | None, reason: str, guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with pytest.raises(UnauthenticatedError) as caught:
            await guarded.generate(key)
        assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError | None)
    assert await guarded.counted("grpc", reason) == 3
    assert len(warnings(caplog, reason)) == 1
    assert "router.listen" in warnings(caplog, reason)[0]


async def test_no_method_but_health_answers_without_a_key(guarded: Guarded) -> None:
    credentials = guarded.certificates.client_tls.credentials()
    async with grpc.aio.secure_channel(guarded.router.address, credentials) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for service, methods in (
            ("Inference", ("Generate", "Attach", "Cancel", "GetRequest", "ListModels", "Tokenize", "Detokenize")),
            ("Cluster", ("GetStatus",)),
        ):
            for method in methods:
                call = channel.unary_stream(f"/pdserve.rpc.v1.{service}/{method}")(b"")
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, method
        reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        assert await reflection(iter([b""])).code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer  x",
        "Basic eDp5",
        "Bearer pdk-000000000000-" + "A" * 43,
        "Bearer \xff",
        "Bearer " + "x" * 9000,
    ],
)
async def test_http_without_a_good_key_is_401_in_openais_form(header: str, guarded: Guarded) -> None:
    async with guarded.http() as client:
        answer = await client.get("/v1/models", headers={"Authorization": header.encode("latin-1")} if header else {})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "invalid_api_key", "invalid_request_error", "authorization",
    )  # fmt: skip


async def test_every_path_but_health_wants_a_key_even_those_that_do_not_exist(guarded: Guarded) -> None:
    async with guarded.http() as client:
        statuses = {
            op.path: (await client.request(op.method, op.path.replace("{", "").replace("}", ""))).status_code
            for op in OPERATIONS
        }
        assert (await client.get("/nothing")).status_code == 401
        assert (await client.get("/health/../v1/models")).status_code == 401
    assert statuses.pop("/health") == 200
    # The files of the page say nothing of the deployment; what it shows is behind the key.
    assert (statuses.pop("/dashboard"), statuses.pop("/dashboard/assets/{asset}")) == (200, 404)
    assert set(statuses.values()) == {401}


async def test_a_key_is_right_only_as_a_whole(guarded: Guarded) -> None:
    """O-SEC: id of one, secret of another; a prefix; another case."""
    other, other_key = new_key("other")
    write_keys(guarded.keys_file, [*read_keys(guarded.keys_file), other])

    async def other_is_good() -> bool:
        with contextlib.suppress(UnauthenticatedError):
            return await guarded.generate(other_key) == expected(5)
        return False

    await eventually(other_is_good, "the new key is good")
    mixed = guarded.key[:16] + other_key[16:]
    for wrong in (mixed, guarded.key[:-1], guarded.key + "A", guarded.key.swapcase(), other.sha256):
        with pytest.raises(UnauthenticatedError):
            await guarded.generate(wrong)


async def test_a_revoked_key_is_refused_and_a_broken_file_changes_nothing(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    guarded.keys_file.write_text("keys: [{name: broken}]")
    with caplog.at_level(logging.WARNING, "pdserve.security.api_keys"):

        async def noticed() -> bool:
            assert await guarded.generate(guarded.key) == expected(5)
            return "cannot be used" in caplog.text

        await eventually(noticed, "the broken file is noticed")
    write_keys(guarded.keys_file, [])

    async def refused() -> bool:
        try:
            await guarded.generate(guarded.key)
        except UnauthenticatedError:
            return True
        return False

    await eventually(refused, "the key is refused")


async def test_a_key_has_a_bound_of_its_own_over_both_apis(guarded: Guarded) -> None:
    bounded, key = new_key("bounded", max_requests=1)
    write_keys(guarded.keys_file, [*read_keys(guarded.keys_file), bounded])

    async def is_known() -> bool:
        async with guarded.http(key) as client:
            return (await client.get("/v1/models")).status_code == 200

    await eventually(is_known, "the key is known")
    async with (
        guarded.client(key) as client,
        guarded.http(key) as http,
        client.stream(token_ids=PROMPT, max_tokens=400, temperature=0) as stream,
    ):
        await anext(aiter(stream))
        with pytest.raises(OverloadedError, match="bound of its key"):
            await guarded.generate(key)
        second = await http.post("/v1/completions", json={"prompt": list(PROMPT), "max_tokens": 2})
        assert second.status_code == 429
        assert await guarded.generate(guarded.key) == expected(5), "others are not bounded by it"


async def test_clients_in_the_clear_or_of_another_authority_are_refused_on_both_ports(
    guarded: Guarded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strangers = Certificates(tmp_path / "strangers")
    async with AsyncClient(guarded.router.address, api_key=guarded.key, timeout_s=3, retry=NO_RETRIES) as client:
        with pytest.raises(UnavailableError):
            await client.status()
    with pytest.raises(UnavailableError):
        await guarded.generate(guarded.key, strangers.client_tls)
    async with RawClient.connect(guarded.router.http_address) as raw:
        await raw.send(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {guarded.key}\r\n\r\n".encode())
        assert b"HTTP" not in await raw.read_to_end()
    async with guarded.http(guarded.key, strangers) as http:
        with pytest.raises(httpx2.HTTPError):
            await http.get("/v1/models")

    async def counted() -> bool:
        # A client that does not trust the router leaves in the middle of the handshake.
        return await guarded.counted("http", "handshake") == 2 and await guarded.counted("grpc", "handshake") >= 1

    await eventually(counted, "refusals on both ports are counted")
    assert {len(warnings(caplog, "handshake"))} == {2}, "one line for each port"
    assert await guarded.generate(guarded.key) == expected(5)


async def test_many_that_begin_no_handshake_hold_nobody_up(guarded: Guarded) -> None:
    host, port = guarded.router.http_address.rsplit(":", 1)
    with contextlib.ExitStack() as sockets:
        for _ in range(64):
            sockets.enter_context(socket.create_connection((host, int(port))))
        async with guarded.http(guarded.key) as client:
            assert (await client.get("/v1/models")).status_code == 200


async def test_a_replaced_certificate_is_shown_to_new_connections_while_a_stream_goes_on(guarded: Guarded) -> None:
    async def shown(address: str) -> str:
        host, port = address.rsplit(":", 1)
        return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))

    addresses = (guarded.router.address, guarded.router.http_address)
    before = [await shown(address) for address in addresses]
    async with guarded.client(guarded.key) as client:
        stream = client.stream(token_ids=PROMPT, max_tokens=300, temperature=0)
        tokens = list((await anext(aiter(stream))).token_ids)
        await asyncio.to_thread(guarded.certificates.issue)

        async def replaced() -> bool:
            return all([await shown(a) != old for a, old in zip(addresses, before, strict=True)])

        await eventually(replaced, "both ports show the new certificate")
        tokens += [token async for delta in stream for token in delta.token_ids]
    assert tokens == expected(300)
    assert await guarded.generate(guarded.key) == expected(5)


async def test_a_pair_of_files_that_does_not_fit_is_not_taken(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the middle of a replacement that is not atomic."""
    key_file = guarded.certificates.directory / "public-key.pem"
    right = key_file.read_bytes()
    key_file.write_bytes(guarded.certificates.read("router-key.pem"))

    async def noticed() -> bool:
        assert await guarded.generate(guarded.key) == expected(5)
        return "cannot be used, the ones before go on" in caplog.text

    await eventually(noticed, "the wrong key is noticed")
    key_file.write_bytes(right)
    assert await guarded.generate(guarded.key) == expected(5)


async def test_an_expired_certificate_of_the_router_is_refused_by_clients(guarded: Guarded) -> None:
    await asyncio.to_thread(guarded.certificates.issue, days=EXPIRED)

    async def refused() -> bool:
        try:
            await guarded.generate(guarded.key)
        except UnavailableError:
            return True
        return False

    await eventually(refused, "clients see that it has expired")


@pytest.mark.parametrize("broken", ["cert_file", "key_file"])
async def test_a_router_says_which_certificate_it_cannot_read(
    broken: str, redis_url: str, model_path: Path, certificates: Certificates
) -> None:
    public = certificates.settings["public"] | {broken: "/nowhere.pem"}
    settings = make_config(redis_url, "x", model_path).model_dump() | {"tls": {"public": public}}
    router = RouterService(type(make_config(redis_url, "x", model_path)).model_validate(settings))
    with pytest.raises(ConfigError, match=rf"tls.public.{broken}: /nowhere.pem cannot be read"):
        await router.start()
    await router.stop()


def test_a_key_file_with_a_mistake_is_an_error_that_shows_no_hash(tmp_path: Path) -> None:
    entry, _ = new_key("x")
    path = tmp_path / "keys.yaml"
    write_keys(path, [entry, entry])
    with pytest.raises(ConfigError, match="is there twice"):
        read_keys(path)
    path.write_text(f"keys: [{{id: {entry.id}, name: x, sha256: {entry.sha256}, colour: red}}]")
    with pytest.raises(ConfigError, match="colour") as caught:
        read_keys(path)
    assert entry.sha256 not in caught.value.message
    assert path.stat().st_mode & 0o777 == 0o600


def test_keys_are_random_and_only_their_hash_is_kept() -> None:
    made = [new_key("x") for _ in range(50)]
    assert len({key for _, key in made} | {entry.id for entry, _ in made}) == 100
    assert all(key.split("-", 2)[2] not in ApiKey.model_dump_json(entry) for entry, key in made)
