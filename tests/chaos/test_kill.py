"""Workers are killed and frozen under load: every stream still ends once, with the very tokens of an undisturbed run.

The plain run has one round of each fault; selected by their mark (`pytest -m chaos`) the tests run many.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.client import AsyncClient, Generation
from pdserve.errors import PdServeError
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, READY_TIMEOUT_S, ProcessCluster, wait_until
from pdserve.testing.reference import check_greedy, greedy_reference
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.waiting import eventually

pytestmark = [pytest.mark.quiet, pytest.mark.chaos, pytest.mark.timeout(1200)]

NUM_STREAMS = 8
NUM_TOKENS = 300
MIN_GAP = 1e-3
"""Between the two best logits of the reference. Long outputs without a larger near tie are rare, and this is still a
hundred times what rounding does."""
FAULTS = ("kill prefill", "kill decode", "freeze decode")


@dataclass(frozen=True)
class Case:
    """A prompt and what follows it."""

    prompt: list[int]
    output: tuple[int, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny-kv")


@pytest.fixture(scope="module")
def cases(model: Path) -> list[Case]:
    """NUM_STREAMS prompts whose greedy output has no tie."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(17)
    found: list[Case] = []
    while len(found) < NUM_STREAMS:
        prompts = [rng.integers(3, 300, int(n)).tolist() for n in rng.integers(20, 200, 32)]
        outputs = greedy_reference(model, prompts, NUM_TOKENS)
        found += [Case(p, o.ids) for p, o in zip(prompts, outputs, strict=True) if o.min_gap >= MIN_GAP]
    return found[:NUM_STREAMS]


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[ProcessCluster]:
    """2P+2D whose dead workers are started again, as `pdserve up` does it. A worker counts as frozen after 2 s."""
    stopping, supervised, released = threading.Event(), threading.Event(), threading.Event()
    failures: list[PdServeError] = []
    cluster = ProcessCluster(
        model,
        local__prefill_workers=2,
        local__decode_workers=2,
        router__max_attempts=8,
        router__worker_wait_s=60.0,
        health__peer_timeout_s=2.0,
        transfer__lease_s=4.0,
    )

    def supervise() -> None:
        try:
            cluster.local.supervise(stopping)
        except PdServeError as error:
            failures.append(error)
        supervised.set()
        # A worker that this thread has started again would be killed with it.
        released.wait()

    thread = threading.Thread(target=supervise, name="supervisor")
    try:
        with cluster:
            thread.start()
            yield cluster
            stopping.set()
            supervised.wait()
            assert failures == []
    finally:
        stopping.set()
        released.set()
        thread.join()


async def stream_all(address: str, cases: list[Case], disturb: Callable[[], None]) -> list[Generation | PdServeError]:
    """One stream per case; `disturb` is called, once, when all of them have begun."""
    num_tokens = [0] * len(cases)

    async def run(client: AsyncClient, index: int) -> Generation | PdServeError:
        case = cases[index]
        tokens: list[int] = []
        try:
            async with client.stream(
                token_ids=case.prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
            ) as stream:
                async for delta in stream:
                    tokens += delta.token_ids
                    num_tokens[index] = len(tokens)
                    # Also of a stream that fails later: what a client has seen is right.
                    assert tuple(tokens) == case.output[: len(tokens)], f"stream {index}"
                return await stream.result()
        except PdServeError as error:
            return error

    async with AsyncClient(address, timeout_s=CALL_TIMEOUT_S) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(client, i)) for i in range(len(cases))]
        await eventually(lambda: min(num_tokens) > 0, "all streams have begun", 60.0)
        assert max(num_tokens) < NUM_TOKENS, "a stream was over before the fault"
        disturb()
    return [task.result() for task in tasks]


def assert_exact_or_typed(cases: list[Case], results: list[Generation | PdServeError]) -> int:
    """Every stream has ended in the reference's tokens or a typed error; returns how many exact ones were retried."""
    errors = [result for result in results if isinstance(result, PdServeError)]
    print("errors:", [(e.code, e.message) for e in errors])
    assert all(e.retryable for e in errors)
    num_replayed = 0
    for case, result in zip(cases, results, strict=True):
        if isinstance(result, Generation):
            assert result.token_ids == case.output
            assert result.usage.completion_tokens == NUM_TOKENS
            assert result.usage.prompt_tokens == len(case.prompt)
            num_replayed += result.placement.attempts > 1
    return num_replayed


def num_rounds(config: pytest.Config) -> int:
    """One round in the plain run; many where these tests were asked for by their mark."""
    return 4 if config.option.markexpr == "chaos" else 1


async def test_streams_survive_lost_and_frozen_workers(
    cluster: ProcessCluster, cases: list[Case], pytestconfig: pytest.Config
) -> None:
    """O-WRK-1, O-WRK-2, O-WRK-3: the router replays what a lost worker had, and the worker comes back."""
    seed = 19
    print(f"seed {seed}")
    choice = random.Random(seed)
    for number in range(num_rounds(pytestconfig)):
        for fault in FAULTS:
            kind, role = fault.split()
            before = cluster.infos()
            number_of_signal = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
            struck: list[str] = []

            def strike(role: str = role, number: int = number_of_signal, struck: list[str] = struck) -> None:
                """Whoever has most of the streams; of prefill workers, which have none any more, anyone."""
                running = {name: stats.num_running for name, stats in cluster.stats().items() if name.startswith(role)}
                most = max(running.values())
                struck.append(choice.choice(sorted(name for name, n in running.items() if n == most)))
                cluster.local.process(struck[0]).send_signal(number)

            try:
                results = await stream_all(cluster.address, cases, strike)
                print(f"round {number}: {fault} ({struck[0]})")
                num_replayed = assert_exact_or_typed(cases, results)
                assert num_replayed > 0 or role == "prefill"
            finally:
                for name in struck:
                    cluster.local.process(name).send_signal(signal.SIGCONT)
            victim = struck[0]

            def back(victim: str = victim, kind: str = kind, before: str = before[victim].incarnation) -> bool:
                info = cluster.infos().get(victim)
                return info is not None and (info.incarnation == before) == (kind == "freeze")

            await asyncio.to_thread(wait_until, back, f"{victim} is ready again", READY_TIMEOUT_S)
            await asyncio.to_thread(cluster.assert_quiet)
    results = await stream_all(cluster.address, cases, lambda: None)
    assert [r.token_ids if isinstance(r, Generation) else r for r in results] == [c.output for c in cases]
    assert all(isinstance(r, Generation) and r.placement.attempts == 1 for r in results)


async def test_a_killed_prefill_worker_is_replaced_while_it_computes(
    cluster: ProcessCluster, cases: list[Case], model: Path
) -> None:
    """O-WRK-2: killed with long prompts queued on it and in transfer from it."""
    rng = np.random.default_rng(23)
    prompts: list[list[int]] = []
    before = cluster.infos()
    computed = {name: stats.prefill_tokens_total for name, stats in cluster.stats().items()}
    victims: list[str] = []
    async with AsyncClient(cluster.address, timeout_s=CALL_TIMEOUT_S) as client, asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[Generation]] = []

        async def one_is_computing() -> bool:
            # They may have been done with the last ones between two looks.
            if all(task.done() for task in tasks):
                new = [rng.integers(3, 300, 1500).tolist() for _ in range(NUM_STREAMS)]
                prompts.extend(new)
                tasks.extend(
                    group.create_task(client.generate(token_ids=p, max_tokens=8, temperature=0.0, ignore_eos=True))
                    for p in new
                )
            for name, stats in (await asyncio.to_thread(cluster.stats)).items():
                if stats.num_running > 0 and stats.prefill_tokens_total > computed[name] and name.startswith("prefill"):
                    victims.append(name)
            return bool(victims)

        await eventually(one_is_computing, "the one that is killed computes a prompt", 60.0)
        victim = victims[0]
        cluster.local.process(victim).send_signal(signal.SIGKILL)
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    checks = check_greedy(reference.eval(), prompts, [task.result().token_ids for task in tasks])
    assert [c.wrong_step for c in checks] == [None] * len(checks)
    assert any(task.result().placement.attempts > 1 for task in tasks)

    def back() -> bool:
        info = cluster.infos().get(victim)
        return info is not None and info.incarnation != before[victim].incarnation

    await asyncio.to_thread(wait_until, back, f"{victim} is ready again", READY_TIMEOUT_S)
    await asyncio.to_thread(cluster.assert_quiet)
