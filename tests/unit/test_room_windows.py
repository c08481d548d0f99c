"""Room for jobs whose model has a window: in a pool that holds one stream's window every hand-off can be taken."""

from __future__ import annotations

import pytest

from decode_worker.room import Need
from pdserve.block_hash import BlockHasher
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.kv_layout import KvLayout
from pdserve.kv_window import AHEAD_TOKENS, KvWindow
from pdserve.testing.decode_world import job, key

BLOCK = 32
WINDOW = KvWindow(256, 4)
NUM_BLOCKS = WINDOW.most_tokens(10**6, AHEAD_TOKENS) // BLOCK
MAX_MODEL_LEN = 10_000


def new_blocks() -> SequenceBlocks:
    """As few as a decode worker needs for any sequence of the model."""
    layout = KvLayout(dtype="float32", block_size=BLOCK, num_layers=1, num_kv_heads=1, head_dim=8, window=WINDOW)
    assert layout.longest_sequence(MAX_MODEL_LEN, NUM_BLOCKS) == MAX_MODEL_LEN
    assert layout.longest_sequence(MAX_MODEL_LEN, NUM_BLOCKS - 1) < MAX_MODEL_LEN
    return SequenceBlocks(NUM_BLOCKS, BlockHasher(model_fingerprint="m", block_size=BLOCK), window=WINDOW)


@pytest.mark.parametrize("reserve_tokens", [0, 64, 128, 129, 512, 10**6])
@pytest.mark.parametrize("num_tokens", [1, 600, 1663, 1664, 1919, 1920, 2000, 2047])
def test_a_hand_off_fits_however_much_is_to_be_set_aside(num_tokens: int, reserve_tokens: int) -> None:
    blocks, wanted = new_blocks(), job("a", num_tokens, max_new=3000)
    need = Need.of(wanted, num_tokens, blocks, reserve_tokens, arrives=True)
    need.check("d", blocks, 4, num_tokens, 0.0)
    assert need.take(blocks, 0) is not None
    assert blocks.num_used == need.num_blocks
    assert blocks.blocks_for(num_tokens + min(reserve_tokens, AHEAD_TOKENS)) == len(blocks.ids(key("a")))
    # It grows further than that, with what it does not see any more given back.
    for n in range(num_tokens, num_tokens + 1000):
        assert blocks.grow(key("a"), n + 1)
        blocks.hide(key("a"), n + 1)


@pytest.mark.parametrize("reserve_tokens", [0, 64, 512])
@pytest.mark.parametrize("left", [0, 1, BLOCK, 200])
def test_a_prompt_that_the_pool_holds_is_computed_here_however_much_is_to_be_set_aside(
    left: int, reserve_tokens: int
) -> None:
    blocks = new_blocks()
    num_tokens = blocks.capacity_tokens - left
    need = Need.of(job("a", num_tokens, max_new=3000), num_tokens, blocks, reserve_tokens)
    need.check("d", blocks, 4, num_tokens, 0.0)
    assert need.take(blocks, 0) is not None
