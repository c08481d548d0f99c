"""A prompt of 32k tokens end to end on a CPU. Only selected by its mark; the short form is in tests/component."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdserve.engine.cpu.isa import selected_isa
from pdserve.model.source import open_model
from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.cluster import test_config
from pdserve.testing.long_prompts import long_answer, make_long_model
from pdserve.testing.reference import check_greedy, transformers_model

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(600)]

NUM_PROMPT = 32_000
NUM_TOKENS = 12
MAX_PAUSE_S = 0.05
"""Of the event loop, which router, both workers and the client share here. Streams of others wait as long."""
MAX_MORE_BYTES = 1 << 30
"""Above what a model without a long prompt takes: a single matrix of the prompt by itself would be four times that."""


@pytest.fixture
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


def memory_nbytes(name: str) -> int:
    """Of this process, as /proc/self/status has it: VmRSS now, VmHWM at most."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> None:
    """VmHWM starts again from here: tests before this one had peaks of their own."""
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize("kind", ["cpu", "torch"])
async def test_32k_tokens_get_the_tokens_of_transformers_and_hold_nobody_up(
    redis_url: str, tmp_path: Path, kind: str
) -> None:
    if kind == "cpu" and selected_isa() is None:
        pytest.skip("the CPU engine does not run on this CPU")
    model = make_long_model(tmp_path / "model", "yarn", trained=8192, factor=4.0)
    config = test_config(
        redis_url, f"long-{kind}", model={"path": str(model)}, kv={"num_blocks": 2060},
        engine={"kind": kind, "threads": 1} | ({"weights": "f32"} if kind == "cpu" else {}),
        router={"listen": "127.0.0.1:0"}, health={"heartbeat_s": 0.5, "peer_timeout_s": 20.0},
    )  # fmt: skip
    prompt = np.random.default_rng(2).integers(10, 300, NUM_PROMPT).tolist()
    before = memory_nbytes("VmRSS")
    forget_peak()
    first, again, watch = await long_answer(config, prompt, NUM_TOKENS)
    more_nbytes = memory_nbytes("VmHWM") - before
    (check,) = check_greedy(transformers_model(open_model(str(model))), [prompt], [first.token_ids])
    assert check.wrong_step is None
    assert again.usage.cached_tokens >= NUM_PROMPT - 32
    assert more_nbytes < MAX_MORE_BYTES, f"{more_nbytes >> 20} MiB"
    assert watch.longest_s < MAX_PAUSE_S, f"{1e3 * watch.longest_s:.0f} ms"
