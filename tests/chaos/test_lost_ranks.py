"""Ranks that stop, that cannot load, or that die under load: the group ends, its worker is started again, and requests
go on with the tokens that they would have had."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.client import Generation
from pdserve.engine import load_engine
from pdserve.engine.engine import EngineLostError
from pdserve.engine.parallel.loader import load_parallel_engine
from pdserve.errors import ModelLoadError
from pdserve.model.source import open_model
from pdserve.testing.process_cluster import ProcessCluster, wait_until
from pdserve.testing.ranks import GONE_S, wait_gone
from pdserve.testing.reference import check_greedy, generate
from pdserve.testing.tiny_models import TinyOptions, TinyShape, make_tiny_kv

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

PROMPTS = [[5, 6, 7], list(range(10, 50)), [9] * 17]
START_S = 240.0
"""For a cluster of workers that load torch several times each."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_four_ranks_with_copied_kv_heads_lose_one(tmp_path: Path) -> None:
    source = open_model(str(make_tiny_kv(tmp_path / "model")))
    wanted = generate(load_engine(source, num_blocks=60), PROMPTS, 6)
    loaded = load_parallel_engine(source, 4, num_blocks=60, num_threads=4, timeout_s=60.0)
    try:
        assert generate(loaded.engine, PROMPTS, 6) == wanted
        os.kill(loaded.group.pids[1], signal.SIGKILL)
        with pytest.raises(EngineLostError, match=r"rank 2 .* was killed by SIGKILL"):
            generate(loaded.engine, PROMPTS, 6)
        wait_gone(loaded.group.pids)
    finally:
        loaded.group.close()


def test_a_rank_that_is_stopped_ends_the_group_by_the_time_out(tmp_path: Path) -> None:
    source = open_model(str(make_tiny_kv(tmp_path / "model")))
    loaded = load_parallel_engine(source, 2, num_blocks=60, num_threads=2, timeout_s=2.0)
    try:
        generate(loaded.engine, PROMPTS, 2)
        os.kill(loaded.group.pids[0], signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(EngineLostError, match="a step failed in between"):
            generate(loaded.engine, PROMPTS, 2)
        assert time.monotonic() - begin < 2.0 + GONE_S
        wait_gone(loaded.group.pids)
    finally:
        loaded.group.close()


def test_a_follower_that_cannot_load_says_why(tmp_path: Path) -> None:
    path = make_tiny_kv(tmp_path / "model", shape=TinyShape(num_layers=1))
    source = open_model(str(path))
    assert source.fingerprint
    make_tiny_kv(path, seed=1, shape=TinyShape(num_layers=1))
    with pytest.raises(ModelLoadError, match=r"rank 1: .*has been replaced while the worker started"):
        load_parallel_engine(source, 2, num_blocks=4, num_threads=2)
    assert not psutil.Process().children()


def test_the_bytes_of_the_pool_are_those_of_all_ranks(tmp_path: Path) -> None:
    """A model with one KV head is copied to both ranks, so that the same memory holds half as many tokens."""
    source = open_model(str(make_tiny_kv(tmp_path / "model", shape=TinyShape(num_layers=1, num_kv_heads=1))))
    block_nbytes = load_engine(source, num_blocks=1).layout.block_nbytes
    loaded = load_parallel_engine(source, 2, kv_cache_bytes=10 * block_nbytes, num_threads=2)
    try:
        assert loaded.engine.num_blocks == 5
        assert loaded.engine.layout.block_nbytes == block_nbytes
    finally:
        loaded.group.close()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 4), (4, 2)], ids=lambda size: f"{size}")
def test_requests_survive_a_rank_and_the_worker_comes_back(tmp_path: Path, prefill: int, decode: int) -> None:
    """Real processes, unequal numbers of ranks, SIGKILL of a follower of each kind of worker under load."""
    model = make_tiny_kv(tmp_path / "model", options=TinyOptions(add_bos=True))
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.eval()
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 300, length).tolist() for length in (1, 15, 16, 17, 40, 70) * 4]
    pools = {
        role: {"role": role, "settings": {"engine": {"tensor_parallel": size}}}
        for role, size in (("prefill", prefill), ("decode", decode))
    }
    cluster = ProcessCluster(
        model,
        model__served_name="tiny",
        local__start_timeout_s=START_S,
        router__worker_wait_s=START_S,
        router__default_deadline_s=3 * START_S,
        deployment__pools=pools,
    )
    with _supervisor(cluster) as supervised, cluster:
        before = {name: info.incarnation for name, info in cluster.infos().items()}
        cuts = {name: info.kv_layout.head_cuts for name, info in cluster.infos().items()}
        assert cuts == {"prefill-0": _cuts(prefill), "decode-0": _cuts(decode)}
        with supervised():

            def ask(prompt: list[int]) -> Generation:
                return cluster.client.generate(
                    token_ids=prompt, max_tokens=32, temperature=0.0, ignore_eos=True, timeout_s=3 * START_S
                )

            with ThreadPoolExecutor(8) as threads:
                futures = [threads.submit(ask, prompt) for prompt in prompts]
                wait_until(lambda: sum(f.done() for f in futures) >= 4, "some requests are done", START_S)
                victim = "decode-0" if decode > 1 else "prefill-0"
                worker = psutil.Process(cluster.local.process(victim).pid)
                ranks = [child.pid for child in worker.children()]
                assert len(ranks) == (decode if victim == "decode-0" else prefill) - 1
                os.kill(ranks[-1], signal.SIGKILL)
                wait_gone([worker.pid, *ranks], 30.0)
                results = [future.result() for future in futures]
            checks = check_greedy(reference, prompts, [result.token_ids for result in results])
            assert [check.wrong_step for check in checks if check.wrong_step is not None] == []

            def is_back() -> bool:
                info = cluster.infos().get(victim)
                return info is not None and info.incarnation != before[victim]

            wait_until(is_back, f"{victim} is back", START_S)
    said = "\n".join(cluster.lines(victim))
    assert "was killed by SIGKILL" in said


@contextmanager
def _supervisor(cluster: ProcessCluster) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """What supervises the cluster while one is in the context that this gives. The thread lives until the end, as the
    kernel ends processes with the thread that has started them."""
    stopping, over = threading.Event(), threading.Event()

    def run() -> None:
        cluster.local.supervise(stopping)
        over.wait()

    thread = threading.Thread(target=run, name="supervisor")

    @contextmanager
    def supervised() -> Iterator[None]:
        thread.start()
        try:
            yield
        finally:
            stopping.set()

    try:
        yield supervised
    finally:
        stopping.set()
        over.set()
        if thread.ident is not None:
            thread.join()


def _cuts(size: int) -> tuple[int, ...]:
    return () if size == 1 else (1,)
