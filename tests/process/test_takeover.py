"""Two routers as processes, one of which is killed, frozen or stopped while its clients read."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.addresses import free_port
from pdserve.client import Client, Generation
from pdserve.config import load_config
from pdserve.errors import UnavailableError
from pdserve.launch.plan import ProcessPlan
from pdserve.launch.process import ManagedProcess
from pdserve.testing.process_cluster import ProcessCluster, wait_until

pytestmark = [pytest.mark.quiet, pytest.mark.timeout(180)]

PEER_TIMEOUT_S = 3.0
"""Also the lease of a router."""

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 300, "ignore_eos": True},
    "seeded": {"seed": 2**64 - 2, "max_tokens": 150, "ignore_eos": True, "n": 3, "frequency_penalty": 0.5},
    "scored": {"seed": 5, "max_tokens": 200, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1},
    "grammar": {"seed": 7, "max_tokens": 300, "regex": "[a-m ]{250}"},
}


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(tiny_model, kv__num_blocks=2048, health__peer_timeout_s=PEER_TIMEOUT_S) as cluster:
        yield cluster


class Router:
    """One more router of the cluster."""

    def __init__(self, cluster: ProcessCluster, name: str, **settings: Any) -> None:
        """Starts it; `wait_ready` before it is used."""
        port = free_port("127.0.0.1:0", "router.listen")
        self.address = f"127.0.0.1:{port}"
        own = {"router.listen": self.address, "router.http_port": 0, "router.router_id": name, **settings}
        config = load_config(
            environ={},
            overrides=cluster.settings | own | {"store.url": cluster.local.redis_url, "log.format": "json"},
        )
        self.process = ManagedProcess(ProcessPlan(name=name, command="router", config=config), lambda who, line: None)

    def wait_ready(self) -> None:
        with Client(self.address, timeout_s=5.0) as client:
            wait_until(lambda: self._ready(client), f"{self.process.name} is ready", 60.0)

    def _ready(self, client: Client) -> bool:
        assert self.process.running, self.process.describe_end()
        try:
            return sum(worker.state == "ready" for worker in client.status().workers) == 2
        except UnavailableError:
            return False

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        if not self.process.wait(20.0):
            self.process.send_signal(signal.SIGKILL)
            raise AssertionError(f"{self.process.name} did not stop")


@pytest.fixture(scope="module")
def second(cluster: ProcessCluster) -> Iterator[Router]:
    """Nothing happens to this one."""
    router = Router(cluster, "second")
    try:
        yield router
    finally:
        router.stop()


@pytest.fixture
def routers(cluster: ProcessCluster, second: Router) -> Iterator[tuple[Router, Router]]:
    first = Router(cluster, "first", **{"router.drain_timeout_s": 0.2})
    try:
        first.wait_ready()
        second.wait_ready()
        yield first, second
    finally:
        first.stop()
    assert second.process.running, second.process.describe_end()
    cluster.assert_quiet()


def some_prompt(number: int) -> list[int]:
    ids: list[int] = np.random.default_rng(number).integers(3, 300, 40).tolist()
    return ids


def essence(generation: Generation) -> list[tuple[Any, ...]]:
    return [
        (o.token_ids, o.text, o.finish_reason, [(e.token_id, e.logprob, e.top) for e in o.logprobs])
        for o in generation.outputs
    ]


@pytest.mark.parametrize("case", CASES)
def test_clients_of_a_killed_router_see_a_pause_and_then_exactly_what_was_to_come(
    cluster: ProcessCluster, routers: tuple[Router, Router], case: str
) -> None:
    first, second = routers
    options = CASES[case] | {"token_ids": some_prompt(len(case))}
    whole = cluster.client.generate(**options)
    with (
        Client([first.address, second.address], timeout_s=60.0) as client,
        client.stream(**options, resumable=True, request_id=f"killed-{case}") as stream,
    ):
        texts = [""] * len(whole.outputs)
        num_tokens = longest_gap_s = 0.0
        last = time.monotonic()
        for delta in stream:
            texts[delta.index] += delta.text
            longest_gap_s = max(longest_gap_s, time.monotonic() - last)
            last = time.monotonic()
            before, num_tokens = num_tokens, num_tokens + len(delta.token_ids)
            if before < 20 <= num_tokens:
                first.process.send_signal(signal.SIGKILL)
                first.process.wait(5.0)
        result = stream.result()
    assert essence(result) == essence(whole)
    assert texts == [output.text for output in whole.outputs]
    # Nobody else had it: it was interrupted.
    assert result.placement.attempts > 1
    assert longest_gap_s < PEER_TIMEOUT_S + 3.0
    assert client_state(cluster, f"killed-{case}") == ("FINISHED", "second")


def client_state(cluster: ProcessCluster, name: str) -> tuple[str, str]:
    cluster.wait_terminal([name])
    info = cluster.client.get_request(name)
    return info.state, info.router_id


def test_clients_of_a_frozen_router_go_on_at_another_one_while_it_is_frozen(
    cluster: ProcessCluster, routers: tuple[Router, Router]
) -> None:
    first, second = routers
    options = CASES["greedy"] | {"token_ids": some_prompt(98), "max_tokens": 900}
    whole = cluster.client.generate(**options)
    with (
        Client([first.address, second.address], timeout_s=60.0) as client,
        client.stream(**options, request_id="frozen") as stream,
    ):
        tokens: list[int] = []
        last, longest_gap_s = time.monotonic(), 0.0
        for delta in stream:
            longest_gap_s = max(longest_gap_s, time.monotonic() - last)
            last = time.monotonic()
            before = len(tokens)
            tokens += delta.token_ids
            if before < 20 <= len(tokens):
                first.process.send_signal(signal.SIGSTOP)
        result = stream.result()
    # It has been frozen all the time.
    assert client_state(cluster, "frozen") == ("FINISHED", "second")
    first.process.send_signal(signal.SIGCONT)
    assert tuple(tokens) == result.token_ids == whole.token_ids
    assert result.placement.attempts > 1
    assert longest_gap_s < PEER_TIMEOUT_S + 4.0


def test_a_router_that_thaws_late_changes_nothing(cluster: ProcessCluster, routers: tuple[Router, Router]) -> None:
    first, second = routers
    options = CASES["greedy"] | {"token_ids": some_prompt(99)}
    whole = cluster.client.generate(**options)
    with Client(first.address, timeout_s=60.0) as old, Client(second.address, timeout_s=60.0) as new:
        begun = old.stream(**options, resumable=True, request_id="thawed")
        head = next(iter(begun))
        first.process.send_signal(signal.SIGSTOP)
        with new.attach("thawed", [head.num_tokens]) as rest:
            tokens = [*head.token_ids]
            for delta in rest:
                tokens += delta.token_ids
                if len(tokens) > 100:
                    first.process.send_signal(signal.SIGCONT)
        assert tuple(tokens) == whole.outputs[0].token_ids
        assert client_state(cluster, "thawed") == ("FINISHED", "second")

        def idle() -> bool:
            return old.status().num_active_requests == 0

        wait_until(idle, "the first router has let go of it")
        # Whoever still hangs on the old stream is sent to where the request is, or has got all of it.
        assert client_state(cluster, "thawed") == ("FINISHED", "second")
        begun.close()


def test_a_router_that_is_stopped_leaves_its_streams_to_another_one_without_a_pause_of_a_lease(
    cluster: ProcessCluster, routers: tuple[Router, Router]
) -> None:
    first, second = routers
    options = CASES["greedy"] | {"token_ids": some_prompt(100), "max_tokens": 900}
    whole = cluster.client.generate(**options)
    with (
        Client([first.address, second.address], timeout_s=60.0) as client,
        client.stream(**options, resumable=True, request_id="stopped") as stream,
    ):
        last, longest_gap_s = time.monotonic(), 0.0
        for number, _ in enumerate(stream):
            longest_gap_s = max(longest_gap_s, time.monotonic() - last)
            last = time.monotonic()
            if number == 5:
                first.process.send_signal(signal.SIGTERM)
        assert essence(stream.result()) == essence(whole)
    assert client_state(cluster, "stopped") == ("FINISHED", "second")
    assert longest_gap_s < PEER_TIMEOUT_S
    assert first.process.wait(15.0) and first.process.exit_code == 0
