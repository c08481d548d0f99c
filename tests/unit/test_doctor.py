"""`pdserve doctor` finds what is wrong, and says what to do."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from pdserve.cli.doctor import doctor
from pdserve.config import Config, load_config
from pdserve.doctor.certificates import check_certificates
from pdserve.doctor.findings import Finding, Verdict
from pdserve.doctor.machine import Gpus, check_gpus, check_memory, check_open_files, check_processor, check_ranks
from pdserve.doctor.peers import check_model, check_pairs, check_peers
from pdserve.doctor.ports import check_ports
from pdserve.doctor.ptrace import check_ptrace, read_of_a_child
from pdserve.doctor.store import check_skew, check_store
from pdserve.kv_layout import KvLayout
from pdserve.security.authority import Authority
from pdserve.security.identity import Identity, PeerRole
from pdserve.store.embedded import EmbeddedRedis
from pdserve.types import Role
from pdserve.worker_info import WorkerInfo

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=16, block_size=16, dtype="float32")


def config_of(**settings: object) -> Config:
    return load_config(environ={}, overrides={name.replace("__", "."): value for name, value in settings.items()})


def worker(role: Role, address: str = "127.0.0.1:1", fingerprint: str = "f" * 16) -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"{role}-0",
        incarnation="i",
        role=role,
        address=address,
        model="m",
        model_fingerprint=fingerprint,
        kv_layout=LAYOUT,
        num_blocks=8,
        max_model_len=64,
        transports=("grpc",),
        version="0",
    )


def assert_says(finding: Finding, verdict: Verdict, *, names: str, remedy: str) -> None:
    assert finding.verdict is verdict
    assert names in finding.message and remedy in finding.remedy


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_finds_that_there_is_no_way_to_redis() -> None:
    (finding,), workers = await check_store(config_of(store__url=f"redis://127.0.0.1:{free_port()}/0"))
    assert_says(finding, Verdict.PROBLEM, names="redis at redis://127.0.0.1", remedy="firewall")
    assert workers == []


@pytest.fixture
def locked_redis() -> Iterator[str]:
    server = EmbeddedRedis()
    server.start()
    try:
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", "right")
        yield server.url
    finally:
        server.close()


async def test_finds_a_wrong_password(locked_redis: str, tmp_path: Path) -> None:
    password = tmp_path / "password"
    for wrong in (None, "secret-guess"):
        settings = {} if wrong is None else {"store__password_file": str(password)}
        password.write_text(wrong or "")
        (finding,), _ = await check_store(config_of(store__url=locked_redis, **settings))
        assert_says(finding, Verdict.PROBLEM, names="failed", remedy="store.password_file")
        assert "secret-guess" not in finding.message
    password.write_text("right")
    findings, _ = await check_store(config_of(store__url=locked_redis, store__password_file=str(password)))
    assert [(finding.check, finding.verdict) for finding in findings] == [("redis", "ok"), ("clock", "ok")]


def test_finds_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        (finding,) = check_ports(config_of(router__listen=address, router__http_port=None), frozenset({"router"}))
    assert_says(finding, Verdict.PROBLEM, names=f"router.listen: cannot listen on {address}", remedy="ss -ltnp")


async def test_finds_a_peer_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.doctor.peers.ANSWER_S", 0.2)
    lonely = worker(Role.DECODE, f"127.0.0.1:{free_port()}")
    findings = await check_peers(config_of(), [lonely], None)
    assert_says(findings[0], Verdict.PROBLEM, names="decode-0 at 127.0.0.1", remedy="decode.advertise")


def test_finds_another_model_and_workers_that_do_not_fit_each_other() -> None:
    prefill, decode = worker(Role.PREFILL, fingerprint="a" * 16), worker(Role.DECODE, fingerprint="b" * 16)
    found = check_model(config_of(), [prefill, decode])
    assert [finding.verdict for finding in found] == [Verdict.PROBLEM] * 2
    assert_says(found[0], Verdict.PROBLEM, names="prefill-0: model fingerprint aaaa", remedy="sha256sum")
    (pair,) = check_pairs([prefill, decode])
    assert_says(pair, Verdict.PROBLEM, names="prefill-0 cannot hand KV to decode-0", remedy="same model")


def test_finds_that_kv_is_rounded_between_workers() -> None:
    coded = replace(worker(Role.DECODE), kv_layout=replace(LAYOUT, dtype="int8"))
    (pair,) = check_pairs([worker(Role.PREFILL), coded])
    assert_says(pair, Verdict.WARNING, names="prefill-0 has KV in float32 and decode-0 in int8", remedy="kv.dtype")
    assert check_pairs([worker(Role.PREFILL), worker(Role.DECODE)]) == []


def test_finds_that_memory_of_others_must_not_be_read(tmp_path: Path) -> None:
    yama = tmp_path / "ptrace_scope"
    yama.write_text("3\n")
    (finding,) = check_ptrace(config_of(), lambda: 0, yama)
    assert_says(finding, Verdict.WARNING, names="kernel.yama.ptrace_scope is 3", remedy="0 or 1")
    yama.write_text("1\n")
    (finding,) = check_ptrace(config_of(), lambda: errno.EPERM, yama)
    assert_says(finding, Verdict.WARNING, names="Operation not permitted", remedy="seccomp")
    assert check_ptrace(config_of(transfer__transports=["tcp", "grpc"]), lambda: errno.EPERM, yama) == []


def test_really_reads_another_process() -> None:
    assert read_of_a_child() in (0, errno.EPERM, errno.ENOSYS)


def test_finds_a_clock_that_is_wrong() -> None:
    assert check_skew(0.4).verdict is Verdict.OK
    assert_says(check_skew(-90.0), Verdict.WARNING, names="90 s behind", remedy="NTP")


def test_finds_that_there_is_no_gpu_and_no_nccl() -> None:
    config = config_of(engine__device="cuda:1", transfer__transports=["torch", "grpc"])
    (finding,) = check_gpus(config, lambda: Gpus(torch_version=None))
    assert_says(finding, Verdict.PROBLEM, names="not installed", remedy="pdserve[torch]")
    (finding,) = check_gpus(config, lambda: Gpus(torch_version="2", count=1))
    assert_says(finding, Verdict.PROBLEM, names="sees 1 GPUs", remedy="nvidia-smi")
    _, finding = check_gpus(config, lambda: Gpus(torch_version="2", count=2))
    assert_says(finding, Verdict.PROBLEM, names="has no NCCL", remedy="CUDA build")


def test_finds_too_few_gpus_or_cores_for_the_ranks_of_a_worker() -> None:
    on_gpus = config_of(engine__device="cuda:1", engine__tensor_parallel=2, transfer__transports=["grpc"])
    (finding,) = check_gpus(on_gpus, lambda: Gpus(torch_version="2", count=2))
    assert_says(finding, Verdict.PROBLEM, names="engine.tensor_parallel 2", remedy="nvidia-smi")
    _, finding = check_gpus(on_gpus, lambda: Gpus(torch_version="2", count=3))
    assert_says(finding, Verdict.PROBLEM, names="has no NCCL", remedy="engine.tensor_parallel to 1")
    assert check_ranks(on_gpus, lambda: 1) == []
    on_cpus = config_of(engine__tensor_parallel=4)
    (finding,) = check_ranks(on_cpus, lambda: 2)
    assert_says(finding, Verdict.WARNING, names="there are 2 cores", remedy="lower engine.tensor_parallel")
    (finding,) = check_ranks(on_cpus, lambda: 4)
    assert finding.verdict is Verdict.OK
    (finding,) = check_ranks(config_of(engine__tensor_parallel=2, engine__kind="cpu"), lambda: 4)
    assert_says(finding, Verdict.PROBLEM, names="the CPU engine is one process", remedy="engine.kind to torch")
    assert check_ranks(config_of(), lambda: 1) == []


def test_finds_what_the_machine_lacks() -> None:
    assert_says(check_open_files(lambda: 256), Verdict.WARNING, names="at most 256", remedy="LimitNOFILE")
    assert_says(check_memory(config_of(), lambda: 1 << 20), Verdict.PROBLEM, names="kv.pool_bytes", remedy="lower")
    forced = config_of(engine__kind="cpu")
    assert_says(check_processor(forced, lambda: ()), Verdict.PROBLEM, names="no AVX2", remedy="engine.kind")


def test_finds_certificates_that_are_missing_or_have_expired_or_soon_will(tmp_path: Path) -> None:
    files = {name: str(tmp_path / f"{{role}}{end}") for name, end in (("cert_file", ".pem"), ("key_file", "-key.pem"))}
    config = config_of(tls__internal={**files, "ca_file": str(tmp_path / "ca.pem")})
    roles = frozenset({"decode"})
    (finding,) = check_certificates(config, roles)
    assert_says(finding, Verdict.PROBLEM, names="decode.pem cannot be read", remedy="readable by the user")
    authority = Authority(tmp_path)
    authority.ensure(config.cluster)
    identity = Identity(config.cluster, PeerRole.DECODE, "d")
    authority.issue_internal(identity, days=90)
    assert check_certificates(config, roles)[0].verdict is Verdict.OK
    (finding,) = check_certificates(config, roles, datetime.now(UTC) + timedelta(days=80))
    assert_says(finding, Verdict.WARNING, names="expires on", remedy="renew")
    authority.issue_internal(identity, days=-1)
    (finding,) = check_certificates(config, roles)
    assert_says(finding, Verdict.PROBLEM, names="expired", remedy="renew")


def test_tells_scripts_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"store:\n  url: redis://127.0.0.1:{free_port()}/0\nrouter:\n  listen: 127.0.0.1:0\n")
    arguments = ["--config", str(path), "--role", "router", "--json"]
    result = CliRunner().invoke(doctor, arguments, standalone_mode=False)
    tree = json.loads(result.output)
    assert result.return_value == 1 and tree["problems"] == 1
    assert {"check", "verdict", "message", "remedy"} == set(tree["findings"][0])
    path.write_text("router:\n  lissten: x\n")
    result = CliRunner().invoke(doctor, arguments, standalone_mode=False)
    assert result.return_value == 2
    assert "did you mean 'listen'" in json.loads(result.output)["findings"][0]["message"]
