"""What a hand-off of a model with a window leaves out, as both sides work it out for themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.hidden import hidden_tokens, sent_blocks
from kv_transfer.plan import ChunkPlan
from pdserve.kv_layout import KvLayout
from pdserve.kv_window import KvWindow, without
from pdserve.types import GenerationJob, HandoffPurpose, PrefixFetch, RunningStream, SamplingParams

LAYOUT = KvLayout(
    dtype="float16", block_size=16, num_layers=2, num_kv_heads=2, head_dim=16, window=KvWindow(size=100, sinks=4)
)
JOB = GenerationJob(
    request_id="q",
    attempt=1,
    router_id="r",
    token_ids=tuple(range(1000)),
    num_prompt_tokens=1000,
    max_new_tokens=10,
    sampling=SamplingParams(),
)


def test_sinks_and_window_of_a_prompt_are_sent() -> None:
    hidden = hidden_tokens(JOB, LAYOUT)
    assert hidden == range(128, 896)
    blocks = list(range(63))
    sent = sent_blocks(blocks, hidden, 16)
    assert sent == (*range(8), *range(56, 63))
    assert len(sent) == ChunkPlan.make(without(hidden, 1000), LAYOUT, 1 << 20).num_blocks


def test_blocks_of_both_sides_hold_the_same_tokens_whatever_their_sizes() -> None:
    hidden = hidden_tokens(JOB, LAYOUT)
    for block_size in (8, 16, 32, 64, 128):
        num_blocks = -(-1000 // block_size)
        sent = sent_blocks(range(num_blocks), hidden, block_size)
        tokens = [t for b in sent for t in range(b * block_size, (b + 1) * block_size) if t < 1000]
        assert tokens == [t for t in range(1000) if t not in hidden]


def test_a_stream_that_runs_on_may_stop_at_once() -> None:
    """It has room for 1,300 tokens by the commit, and its next query may be at position 1,000 all the same."""
    assert hidden_tokens(RunningStream(job=JOB, exact=True), LAYOUT) == range(128, 896)


@pytest.mark.parametrize(
    ("purpose", "layout"),
    [
        (PrefixFetch(request_id="q", attempt=1, last_block=b"x" * 16), LAYOUT),
        (JOB, replace(LAYOUT, window=KvWindow())),
        (replace(JOB, token_ids=JOB.token_ids[:200], num_prompt_tokens=200), LAYOUT),
    ],
    ids=["a prefix", "no window", "a short prompt"],
)
def test_everything_else_is_sent_whole(purpose: HandoffPurpose, layout: KvLayout) -> None:
    hidden = hidden_tokens(purpose, layout)
    assert not hidden
    assert sent_blocks((5, 6, 7), hidden, 16) == (5, 6, 7)
    assert without(hidden, 999) == 999
