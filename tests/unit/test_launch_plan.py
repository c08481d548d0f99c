"""What a local cluster consists of, and when it restarts what has ended."""

from __future__ import annotations

import io
import json
import socket
from typing import Any

import pytest

from pdserve.addresses import Reservation, dialable, free_port
from pdserve.config import Config, load_config
from pdserve.cpus import available_cpus
from pdserve.errors import ConfigError
from pdserve.launch.plan import ProcessPlan, lends_cores, plan_processes
from pdserve.launch.process import LineWriter
from pdserve.launch.restart import MAX_DELAY_S, MAX_FAILURES, STABLE_S, RestartPolicy


def config_of(**overrides: Any) -> Config:
    return load_config(environ={}, overrides={k.replace("__", "."): v for k, v in overrides.items()})


def plan(**overrides: Any) -> list[ProcessPlan]:
    return plan_processes(
        config_of(**overrides),
        store_url="unix:///redis.sock",
        router_address="127.0.0.1:7",
        http_port=8,
        log_format="text",
    )


def test_a_cluster_is_a_router_and_its_workers_with_stable_names() -> None:
    plans = plan(local__prefill_workers=2, local__decode_workers=1)
    assert [(p.name, p.command) for p in plans] == [
        ("router-0", "router"),
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode-0", "decode"),
    ]
    assert plans[0].config.router.router_id == "router-0"
    assert plans[2].config.prefill.worker_id == "prefill-1"
    assert plans[3].config.decode.worker_id == "decode-0"


def test_a_cluster_may_consist_of_decode_workers_alone() -> None:
    plans = plan(local__prefill_workers=0, local__decode_workers=2)
    assert [(p.name, p.command) for p in plans] == [
        ("router-0", "router"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]
    with pytest.raises(ConfigError, match=r"local\.prefill_workers: 0 .* decode\.local_prefill_tokens_per_step"):
        plan(local__prefill_workers=0, decode__local_prefill_tokens_per_step=0)


def test_every_process_gets_the_same_store_and_the_router_its_address() -> None:
    plans = plan(local__prefill_workers=2)
    assert {p.config.store.url for p in plans} == {"unix:///redis.sock"}
    assert {p.config.log.format for p in plans} == {"text"}
    assert plans[0].config.router.listen == "127.0.0.1:7"
    assert plans[0].config.router.http_listen == "127.0.0.1:8"


def test_threads_are_shared_out_unless_they_are_set() -> None:
    cores = available_cpus()
    assert {p.config.engine.threads for p in plan()} == {max(1, cores // 2)}
    assert {p.config.engine.threads for p in plan(local__prefill_workers=64)} == {max(1, cores // 65)}
    assert {p.config.engine.threads for p in plan(engine__threads=7)} == {7}


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores of two threads each, and no quota."""
    monkeypatch.setattr("pdserve.launch.plan.allowed_cores", lambda: [[0, 4], [1, 5], [2, 6], [3, 7]])
    monkeypatch.setattr("pdserve.launch.plan.available_cpus", lambda: 8)


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ({"local__decode_workers": 2}, [(0, 4), (1, 5), (2, 3)]),
        ({"engine__threads": 2}, [(0, 1), (2, 3)]),
        # More threads than CPUs: workers share them.
        ({"engine__threads": 5}, [False, False]),
        # Nothing to gain.
        ({"engine__threads": 1}, [False, False]),
        ({"engine__pin_threads": False}, [False, False]),
        ({"engine__threads": 1, "engine__pin_threads": True}, [(0,), (2,)]),
    ],
)
def test_threads_of_workers_with_cores_of_their_own_are_pinned(overrides: dict[str, Any], expected: list[Any]) -> None:
    router, *workers = plan(**overrides)
    assert router.config.engine.pin_threads == overrides.get("engine__pin_threads", "auto")
    assert [p.config.engine.pin_threads for p in workers] == expected
    # As it goes to the process.
    for worker in workers:
        sent = json.loads(json.dumps(worker.config.model_dump(mode="json")))
        assert load_config(environ={}, overrides=sent).engine.pin_threads == worker.config.engine.pin_threads


def test_a_quota_means_that_others_use_the_same_cpus(eight_cpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.launch.plan.available_cpus", lambda: 4)
    assert [p.config.engine.pin_threads for p in plan()[1:]] == [False, False]


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("overrides", "lends"),
    [
        ({}, True),
        ({"engine__pin_threads": False}, True),
        ({"local__prefill_workers": 9}, True),
        ({"engine__lend_cores": False}, False),
        # Whoever sets it wants it so.
        ({"engine__threads": 2}, False),
        ({"engine__pin_threads": True}, False),
        ({"engine__kind": "torch"}, False),
        # Nobody to borrow from.
        ({"local__prefill_workers": 0}, False),
    ],
)
def test_workers_lend_each_other_cores_that_were_shared_out(overrides: dict[str, Any], lends: bool) -> None:
    assert lends_cores(config_of(**overrides)) is lends


def test_a_single_core_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.launch.plan.available_cpus", lambda: 1)
    assert not lends_cores(config_of())


def test_every_worker_has_a_line_of_its_own_in_the_ledger() -> None:
    plans = plan_processes(
        config_of(local__prefill_workers=2),
        store_url="unix:///redis.sock",
        router_address="127.0.0.1:7",
        http_port=8,
        log_format="text",
        core_ledger="/run/cores",
    )
    assert plans[0].config.engine.core_ledger is None
    for slot, worker in enumerate(plans[1:]):
        sent = json.loads(json.dumps(worker.config.model_dump(mode="json")))
        read = load_config(environ={}, overrides=sent).engine.core_ledger
        assert read is not None and (read.file, read.slot) == ("/run/cores", slot)


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"engine__threads": 5, "engine__pin_threads": True},
            r"pin_threads: 2 workers of 5 threads need more than the 8 CPUs",
        ),
        ({"engine__pin_threads": [0, 1]}, r"pin_threads: 2 workers cannot share the CPUs \[0, 1\]"),
    ],
)
def test_pinning_that_is_not_possible_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**overrides)


@pytest.mark.parametrize("value", ["on", [], [-1], [True], ["0"], 3, None, {}])
def test_a_pinning_that_means_nothing_is_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(ConfigError, match=r"engine\.pin_threads: must be auto, true, false, or a list of CPU numbers"):
        config_of(engine__pin_threads=value)


def test_a_single_worker_keeps_the_name_that_is_configured_and_several_get_numbers() -> None:
    assert [p.name for p in plan(prefill__worker_id="mine")][1] == "mine"
    assert [p.name for p in plan(prefill__worker_id="mine", local__prefill_workers=2)][1:3] == ["mine-0", "mine-1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"local__decode_workers": 2, "decode__listen": "127.0.0.1:9"}, r"decode\.listen: 127\.0\.0\.1:9 .* 2 workers"),
        ({"local__prefill_workers": 2, "prefill__advertise": "a:9"}, r"prefill\.advertise"),
        ({"prefill__worker_id": "same", "decode__worker_id": "same"}, "'same' names more than one process"),
    ],
)
def test_settings_that_only_one_worker_can_have_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**overrides)


def test_a_wildcard_address_is_dialled_on_this_machine() -> None:
    assert dialable("0.0.0.0:5") == "127.0.0.1:5"
    assert dialable("[::]:5") == "[::1]:5"
    assert dialable("example.org:5") == "example.org:5"


def test_port_0_becomes_a_free_port_and_a_taken_one_is_an_error() -> None:
    """O-OPS-4"""
    port = free_port("127.0.0.1:0", "router.listen")
    listen = f"127.0.0.1:{port}"
    assert free_port(listen, "router.listen") == port
    taken = rf"router\.listen: cannot listen on {listen}: Address already in use"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=taken):
        Reservation(listen, "router.listen")


def test_nobody_gets_a_reserved_port_by_chance_and_its_servers_always() -> None:
    """O-OPS-4"""
    reservation = Reservation("127.0.0.1:0", "router.listen")
    try:
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            # As the system does it for whoever asks for any port: without SO_REUSEADDR.
            other.bind(("127.0.0.1", reservation.port))
        for _ in range(2):
            server = socket.create_server(("127.0.0.1", reservation.port))
            with server, pytest.raises(ConfigError, match="Address already in use"):
                Reservation(reservation.listen, "router.listen")
    finally:
        reservation.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", reservation.port))


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"router\.listen: cannot listen on 192\.0\.2\.1:0"):
        Reservation("192.0.2.1:0", "router.listen")


def test_restarts_are_delayed_more_and_more_and_then_given_up() -> None:
    policy = RestartPolicy()
    delays = [policy.ended(ran_s=1.0) for _ in range(MAX_FAILURES + 1)]
    assert delays[-1] is None
    numbers = [d for d in delays[:-1] if d is not None]
    assert len(numbers) == MAX_FAILURES
    assert numbers == sorted(numbers)
    assert max(numbers) <= MAX_DELAY_S


def test_a_process_that_ran_for_long_starts_with_a_clean_record() -> None:
    policy = RestartPolicy()
    first = policy.ended(ran_s=1.0)
    for _ in range(MAX_FAILURES - 1):
        policy.ended(ran_s=1.0)
    assert policy.ended(ran_s=STABLE_S) == first


def test_lines_of_output_carry_the_name_of_their_process() -> None:
    out = io.StringIO()
    lines = LineWriter(out, as_json=False)
    lines("decode-0", "Traceback")
    lines.tell("starting decode-0")
    assert out.getvalue() == "decode-0 | Traceback\nstarting decode-0\n"


def test_as_json_every_line_is_a_log_line() -> None:
    out = io.StringIO()
    lines = LineWriter(out, as_json=True)
    lines("decode-0", '{"msg": "ready"}')
    lines("decode-0", "Traceback")
    lines.tell("decode-0 was killed by SIGKILL\nstarting decode-0 again in 1 s")
    first, *others = out.getvalue().splitlines()
    assert first == '{"msg": "ready"}'
    entries = [json.loads(line) for line in others]
    assert [(e["process"], e["msg"]) for e in entries] == [
        ("decode-0", "Traceback"),
        ("launcher", "decode-0 was killed by SIGKILL\nstarting decode-0 again in 1 s"),
    ]
    assert all({"ts", "level", "logger"} <= e.keys() for e in entries)
