"""The ranks of an engine as processes: they compute what one does, and none outlives the others.

`tests/chaos/test_lost_ranks.py` has more ways to lose one.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
import torch

from pdserve.config import Config
from pdserve.config.schema import LogSection
from pdserve.engine import load_engine
from pdserve.engine.engine import EngineLostError
from pdserve.engine.parallel.loader import load_parallel_engine
from pdserve.engine.parallel.part_model import part_layout
from pdserve.engine.parallel.partition import partition
from pdserve.errors import ConfigError
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.fake_engine import FakeEngines
from pdserve.testing.rank_threads import part_settings
from pdserve.testing.ranks import wait_gone
from pdserve.testing.reference import generate
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.worker.model import LoadedModel, load_model

pytestmark = pytest.mark.timeout(240)

PROMPTS = [[5, 6, 7], list(range(10, 50)), [9] * 17]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    shape = TinyShape(num_layers=2, hidden_size=96, num_heads=6, num_kv_heads=3)
    return open_model(str(make_tiny_kv(tmp_path_factory.mktemp("tiny") / "model", shape=shape)))


def test_processes_give_the_tokens_of_one_rank_until_one_is_killed(source: ModelSource) -> None:
    wanted = generate(load_engine(source, num_blocks=60), PROMPTS, 6)
    loaded = load_parallel_engine(source, 2, num_blocks=60, num_threads=2, timeout_s=60.0)
    group = loaded.group
    try:
        reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        group.on_lost(reasons.put)
        assert generate(loaded.engine, PROMPTS, 6) == wanted
        assert (group.size, len(group.pids), reasons.empty()) == (2, 1, True)
        os.kill(group.pids[0], signal.SIGKILL)
        wait_gone(group.pids)
        says = f"rank 1 (process {group.pids[0]}) was killed by SIGKILL"
        for _ in range(2):
            with pytest.raises(EngineLostError) as caught:
                generate(loaded.engine, PROMPTS, 6)
            assert caught.value.message == says
        assert reasons.get(timeout=10.0) == says
        group.on_lost(reasons.put)
        assert reasons.get_nowait() == says, "who comes late is told at once"
        assert reasons.empty()
    finally:
        group.close()
    assert not psutil.pid_exists(group.pids[0])


_DRIVER = """
import json, sys, time
from pdserve.engine.parallel.group import FollowerStart, RankGroup
from pdserve.shared_memory import SharedMemory
told = json.load(sys.stdin)
memory = SharedMemory.create(told["nbytes"])
group = RankGroup([FollowerStart(settings=told["start"], memory=memory)], timeout_s=60.0)
group.await_ready()
print(*group.pids, flush=True)
time.sleep(600)
"""
"""Rank 0 without torch, which takes seconds to import."""


def test_no_follower_outlives_rank_0_not_even_a_stopped_one(source: ModelSource) -> None:
    own = part_settings(source, 2, num_blocks=4)[1]
    nbytes = 4 * part_layout(own.layout, partition(source.config, 2)[1]).block_nbytes
    start = {
        "model": str(source.path),
        "fingerprint": source.fingerprint,
        "part": own.to_json(),
        "process": "rank1",
        "log": LogSection().model_dump(mode="json"),
    }
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(json.dumps({"start": start, "nbytes": nbytes}))
        driver.stdin.close()
        pids = tuple(map(int, driver.stdout.readline().split()))
        assert len(pids) == 1
        # Terminals and systemd send these to all; when to end is the decision of rank 0.
        os.kill(pids[0], signal.SIGTERM)
        os.kill(pids[0], signal.SIGINT)
        os.kill(pids[0], signal.SIGSTOP)
        assert psutil.Process(pids[0]).status() != psutil.STATUS_ZOMBIE
        driver.kill()
        wait_gone(pids)


@pytest.mark.parametrize(
    ("size", "settings", "field", "says"),
    [
        (4, {}, "engine.tensor_parallel", "3 KV heads cannot be copied evenly to 4 ranks"),
        (2, {"num_blocks": 10**9}, "num_blocks", "do not fit"),
        (2, {"dtype": "float8"}, "dtype", "is not one of"),
        (2, {"num_threads": 0}, "num_threads", "at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(
    source: ModelSource, size: int, settings: dict[str, object], field: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_parallel_engine(source, size, **{"num_blocks": 4, **settings})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("engine", "other", "says"),
    [
        ({"kind": "cpu"}, {}, "the CPU engine is one process"),
        ({}, {"decode": {"speculation": {"draft_model": "small"}}}, "leave out decode.speculation.draft_model"),
        ({"device": "cuda"}, {}, "finds no usable CUDA device"),
    ],
    ids=["cpu", "draft", "cuda"],
)
def test_what_does_not_go_together_is_refused_with_the_reason(
    source: ModelSource, engine: dict[str, object], other: dict[str, object], says: str
) -> None:
    if engine.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    tree = {"model": {"path": str(source.path)}, "engine": {"tensor_parallel": 2, **engine}, **other}
    with pytest.raises(ConfigError, match=says):
        load_model(Config.model_validate(tree), decodes=True)


class FakeGroup:
    """Three processes that end when the test says so."""

    size = 3

    def __init__(self) -> None:
        self.lost: list[Callable[[str], None]] = []
        self.closed = False

    def on_lost(self, call: Callable[[str], None]) -> None:
        """See `EngineGroup`."""
        self.lost.append(call)

    def close(self) -> None:
        """See `EngineGroup`."""
        self.closed = True


async def test_a_worker_that_loses_a_rank_between_steps_ends(
    redis_url: str, cluster_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is computed, so no step fails: the worker must not look well until the next request."""
    group = FakeGroup()
    engines = FakeEngines()

    def factory(config: Config) -> LoadedModel:
        return replace(engines(config), group=group)

    async with InProcessCluster(test_config(redis_url, cluster_name), decode_engines=[factory]) as cluster:
        worker = cluster.decode[0]
        assert not cluster.run_of(worker).done()
        await asyncio.to_thread(group.lost[0], "rank 2 (process 7) was killed by SIGKILL")
        await asyncio.wait_for(cluster.run_of(worker), 5.0)
        assert not group.closed
    assert group.closed
    assert "rank 2 (process 7) was killed by SIGKILL" in caplog.text
