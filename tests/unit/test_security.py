"""Identities, what a role may call, refusals and the files of certificates, without any connection."""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from pdserve.cli.main import cli, main
from pdserve.cli.up import describe
from pdserve.client.access import Access
from pdserve.config import load_config
from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.launch.cluster import LocalCluster
from pdserve.security.api_keys import KeyRing
from pdserve.security.guards import ROLES_OF_SERVICE, may_call
from pdserve.security.handshakes import peer_key
from pdserve.security.identity import Identity, PeerRole, find_identity
from pdserve.security.internal import InternalTls
from pdserve.security.refusals import INTERVAL_S, WORKER_REASONS, Refusal, Refusals
from pdserve.store.login import PASSWORD_VARIABLE, StoreLogin
from pdserve.testing.certificates import EXPIRED, Certificates
from pdserve.testing.fake_router import FakeRouter


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certs"), "one")


# Identity -------------------------------------------------------------------------------------------------------------


def test_an_identity_is_read_back_from_its_uri() -> None:
    for role in PeerRole:
        identity = Identity("a.b-c", role, "x_1")
        assert find_identity([*identity.dns_names, identity.uri]) == identity


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["pdserve://one/prefill"],
        ["pdserve://one/admin/x"],
        ["pdserve://one/prefill/x/y"],
        ["pdserve://one//x"],
        ["xpdserve://one/prefill/x"],
        ["pdserve://one/prefill/x\n"],
        ["pdserve://one/prefill/x", "pdserve://one/router/x"],
        ["prefill.one.pdserve"],
    ],
)
def test_whoever_says_anything_else_or_two_things_has_no_identity(names: list[str]) -> None:
    assert find_identity(names) is None


ROUTER_ONLY = ("pdserve.rpc.v1.PrefillWorker/Session", "pdserve.rpc.v1.DecodeWorker/Session")
FOR_OPERATORS = ("pdserve.rpc.v1.PrefillWorker/Drain", "pdserve.rpc.v1.DecodeWorker/GetStats")
KV = ("pdserve.rpc.v1.KvTransfer/Control", "pdserve.rpc.v1.KvData/Push", "pdserve.rpc.v1.PrefixStore/Fetch")


@pytest.mark.parametrize(
    ("methods", "roles"),
    [
        (ROUTER_ONLY, {PeerRole.ROUTER}),
        (FOR_OPERATORS, {PeerRole.ROUTER, PeerRole.OPERATOR}),
        (KV, {PeerRole.PREFILL, PeerRole.DECODE}),
        (("grpc.health.v1.Health/Check",), set(PeerRole)),
        (("pdserve.rpc.v1.SomethingNew/Do",), set()),
    ],
)
def test_each_method_is_for_its_roles_in_its_own_cluster(methods: tuple[str, ...], roles: set[PeerRole]) -> None:
    for method in methods:
        assert {r for r in PeerRole if may_call(Identity("one", r, "x"), "one", f"/{method}")} == roles
        assert not any(may_call(Identity("two", r, "x"), "one", f"/{method}") for r in PeerRole)
    assert "pdserve.rpc.v1.Inference" not in ROLES_OF_SERVICE


def test_addresses_of_a_peer_have_one_spelling() -> None:
    assert peer_key("::FFFF:10.0.0.7", 5) == peer_key("10.0.0.7", 5)
    assert peer_key("fe80::1%eth0", 5) == "fe80::1:5"


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_reason_is_logged_once_in_an_interval_and_always_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    account = Refusals("x.listen", WORKER_REASONS, clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            account.note(Refusal.ROLE, "10.0.0.1", "detail")
        account.note(Refusal.HANDSHAKE, "", "detail", 3)
        assert len(caplog.records) == 2
        now = INTERVAL_S
        account.note(Refusal.ROLE, "10.0.0.1", "detail")
    assert account.counts == {Refusal.ROLE: 51, Refusal.HANDSHAKE: 3}
    assert [vars(record)["not_logged"] for record in caplog.records] == [0, 0, 49]


# Files ----------------------------------------------------------------------------------------------------------------


def internal(
    certificates: Certificates, role: PeerRole, *, named: str | None = None, cluster: str = "one"
) -> InternalTls:
    at = certificates.directory
    name = named or str(role)
    return InternalTls(
        str(at / f"{name}.pem"), str(at / f"{name}-key.pem"), certificates.ca_file, cluster=cluster, role=role
    )


@pytest.mark.parametrize("role", list(PeerRole))
def test_every_process_takes_the_certificate_of_its_role(certificates: Certificates, role: PeerRole) -> None:
    assert internal(certificates, role).version == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"named": "decode"}, "is that of pdserve://one/decode/decode, and this process needs pdserve://one/prefill/"),
        ({"cluster": "two"}, "is that of pdserve://one/prefill/prefill"),
        ({"named": "public"}, "unsuitable certificate purpose|unsupported certificate purpose"),
        ({"named": "absent"}, r"tls.internal.cert_file: .*absent.pem cannot be read: No such file"),
    ],
)
def test_a_process_does_not_start_with_the_certificate_of_another(
    certificates: Certificates, change: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        internal(certificates, PeerRole.PREFILL, **change)
    assert caught.value.field is not None and caught.value.field.startswith("tls.internal")


def test_a_process_does_not_start_with_an_expired_certificate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="certificate has expired"):
        internal(Certificates(tmp_path / "c", "one", days=EXPIRED), PeerRole.PREFILL)


def test_a_process_does_not_start_with_a_certificate_that_its_own_authority_did_not_sign(
    certificates: Certificates, tmp_path: Path
) -> None:
    other = Certificates(tmp_path / "other", "one")
    at = other.directory
    with pytest.raises(ConfigError, match="cannot be used with this authority"):
        InternalTls(
            str(at / "prefill.pem"),
            str(at / "prefill-key.pem"),
            certificates.ca_file,
            cluster="one",
            role=PeerRole.PREFILL,
        )


def test_a_key_with_a_password_is_an_error_and_no_question(certificates: Certificates, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text(
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\nAAAA\n"
        "-----END RSA PRIVATE KEY-----\n"
    )
    at = certificates.directory
    with pytest.raises(ConfigError, match="certificate and key cannot be used"):
        InternalTls(str(at / "prefill.pem"), str(key), certificates.ca_file, cluster="one", role=PeerRole.PREFILL)


# Configuration --------------------------------------------------------------------------------------------------------

INTERNAL = {"cert_file": "{role}.pem", "key_file": "{role}-key.pem", "ca_file": "ca.pem"}


def test_mutual_tls_leaves_out_transports_that_nothing_encrypts() -> None:
    assert Config.model_validate({}).transports == ("local", "tcp", "grpc")
    assert Config.model_validate({"tls": {"internal": INTERNAL}}).transports == ("local", "grpc")


@pytest.mark.parametrize("names", [["tcp"], ["torch", "nixl"]])
def test_mutual_tls_with_only_such_transports_is_an_error(names: list[str]) -> None:
    with pytest.raises(ValidationError, match="at least one of local, grpc is needed"):
        Config.model_validate({"tls": {"internal": INTERNAL}, "transfer": {"transports": names}})


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ({"url": "redis://h", "ca_file": "x"}, "need a url that begins with rediss://"),
        ({"url": "rediss://h", "cert_file": "x"}, "cert_file and key_file belong together"),
    ],
)
def test_contradictions_about_redis_are_errors(store: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(environ={}, overrides={f"store.{name}": value for name, value in store.items()})


def test_a_cluster_whose_router_would_not_let_its_own_launcher_in_does_not_start(tmp_path: Path) -> None:
    keys = load_config(environ={}, overrides={"router.keys_file": str(tmp_path), "router.listen": "127.0.0.1:0"})
    with pytest.raises(ConfigError, match="PDSERVE_API_KEY"):
        LocalCluster(keys, access=Access()).start()
    public = {"cert_file": "x", "key_file": "x"}
    tls = load_config(environ={}, overrides={"tls.public": public, "router.listen": "127.0.0.1:0"})
    with pytest.raises(ConfigError, match="PDSERVE_TLS_CA_FILE"):
        LocalCluster(tls, access=Access()).start()


def test_commands_take_key_and_authority_from_the_environment() -> None:
    assert Access.from_environment({"PDSERVE_API_KEY": "", "PDSERVE_TLS_CA_FILE": ""}) == Access()
    access = Access.from_environment(
        {"PDSERVE_API_KEY": "k", "PDSERVE_TLS_CA_FILE": "ca.pem", "PDSERVE_TLS_SERVER_NAME": "r"}
    )
    assert access.api_key == "k" and access.tls is not None
    assert (access.tls.ca_file, access.tls.server_name) == ("ca.pem", "r")
    system = Access.from_environment({"PDSERVE_TLS_CA_FILE": "system"})
    assert system.tls is not None and system.tls.ca_file is None


# Redis ----------------------------------------------------------------------------------------------------------------


def test_the_password_of_redis_comes_from_the_environment_a_file_or_the_url(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("from file\n")
    login = StoreLogin(username="u", password_file=str(file))
    url, provider = login.provider("rediss://old:url%20one@h:1/2?x=1", {})
    assert url == "rediss://h:1/2?x=1"
    assert provider is not None and provider.get_credentials() == ("u", "from file")
    file.write_text("rotated")
    assert provider.get_credentials() == ("u", "rotated")
    _, provider = login.provider("redis://h", {PASSWORD_VARIABLE: "from environment"})
    assert provider is not None and provider.get_credentials() == ("u", "from environment")
    _, provider = StoreLogin(username="u").provider("redis://old:url%20one@h", {})
    assert provider is not None and provider.get_credentials() == ("u", "url one")
    assert StoreLogin().provider("redis://a:b@h", {}) == ("redis://a:b@h", None)
    assert "from" not in repr(login)


# Commands -------------------------------------------------------------------------------------------------------------


def test_certs_makes_what_the_printed_configuration_needs(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "certs"
    made = CliRunner().invoke(
        cli, ["certs", str(directory), "--cluster", "lab", "--host", "r.example", "--host", "::1"]
    )
    assert made.exit_code == 0, made.output
    written = tmp_path / "c.yaml"
    written.write_text(made.stdout)
    config = load_config(written, environ={})
    assert config.cluster == "lab"
    for role in PeerRole:
        assert InternalTls.of(config, role) is not None
    authority = (directory / "ca.pem").read_bytes()
    first = (directory / "router.pem").read_bytes()
    assert CliRunner().invoke(cli, ["certs", str(directory), "--cluster", "lab"]).exit_code == 0
    assert (directory / "ca.pem").read_bytes() == authority, "the authority stays"
    assert (directory / "router.pem").read_bytes() != first
    modes = {path.name: path.stat().st_mode & 0o077 for path in directory.iterdir() if "key" in path.name}
    assert len(modes) == 6 and set(modes.values()) == {0}
    assert directory.stat().st_mode & 0o077 == 0


def test_certs_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["certs", *arguments])
        assert isinstance(result.exception, ConfigError)
        return result.exception.message

    assert "--cluster" in message(str(tmp_path / "a"), "--cluster", "a/b")
    assert "must be a name or an address" in message(str(tmp_path / "b"), "--host", "a,DNS:b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "ca.pem").write_text("")
    assert "only one of ca.pem and ca-key.pem" in message(str(tmp_path / "c"))
    monkeypatch.setenv("PATH", os.devnull)
    assert "openssl" in message(str(tmp_path / "d"))


def test_keys_are_made_shown_and_revoked(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.yaml")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["keys", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    key = run("new", file, "alice", "--max-requests", "3").strip()
    other = run("new", file, "bob").strip()
    assert key not in (tmp_path / "keys.yaml").read_text()
    ring = KeyRing(tmp_path / "keys.yaml", clock=lambda: 0.0)
    assert ring.authenticate(f"bearer {key}").max_requests == 3
    assert ring.authenticate(f"Bearer {other}").name == "bob"
    shown = run("list", file)
    assert "alice" in shown and "bob" in shown and ring.authenticate(f"Bearer {key}").sha256 not in shown
    key_id = key.split("-")[1]
    run("revoke", file, key_id)
    assert "alice" not in run("list", file)
    again = CliRunner().invoke(cli, ["keys", "revoke", file, key_id])
    assert again.exception is not None and "no key has the id" in str(again.exception)


def test_what_up_suggests_for_a_secured_cluster_works(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "a-key")
    monkeypatch.setenv("PDSERVE_TLS_CA_FILE", certificates.ca_file)
    config = load_config(environ={}, overrides={"tls": certificates.settings, "router.keys_file": "keys.yaml"})
    with FakeRouter(certificate=(certificates.read("public-key.pem"), certificates.read("public.pem"))) as router:
        cluster = LocalCluster(config)
        cluster.listen, cluster.http_listen, cluster.redis_url = router.address, "127.0.0.1:8000", "unix:///redis.sock"
        lines = describe(cluster).splitlines()
        (call,) = (shlex.split(line) for line in lines if " -c " in line)
        exec(call[-1], {})
        (generate,) = (shlex.split(line) for line in lines if " generate " in line)
        assert main(generate[generate.index("generate") :]) == 0
    assert capsys.readouterr().out == "Hello, wörld\n" * 2
    (curl,) = (line for line in lines if "curl" in line)
    assert "https://127.0.0.1:8000" in curl and "a-key" not in curl
