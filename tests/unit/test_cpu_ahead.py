"""What is fetched while matrices are multiplied: the blocks that attention reads, shared among threads, and no result
that depends on it."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve.engine.cpu import ahead as a
from pdserve.engine.cpu.formats import BLOCK, LINE_NBYTES, Q4_1, Q8_0, ROWS, STRIP
from pdserve.engine.cpu.gemm import gemm
from pdserve.engine.cpu.ops import quantize
from pdserve.engine.cpu.tile import MAX_TOKENS
from pdserve.engine.cpu.weights import pack_float

BLOCK_SIZE = 16
LAYER_STRIDE = 1024
LAYERS = 3
BLOCK_STRIDE = LAYERS * LAYER_STRIDE


def collected(kv: np.ndarray, thread: int, threads: int) -> tuple[np.ndarray, list[int]]:
    """The list of a thread, and its blocks: of two sequences that decode at positions 40 and 3, and of a prompt of 20
    tokens in two tiles that begins at position 16."""
    tables = np.array([[7, 2, 5], [1, 0, 0], [6, 4, 3]], np.int32)
    positions = np.array([40, 3, *range(16, 36)], np.int32)
    sequence = np.array([0, 1, *[2] * 20], np.int64)
    items = np.array([[0, 1], [1, 1], [2, 8], [10, 12]], np.int64)
    ahead = np.zeros(a.AHEAD_LENGTH, np.int64)
    a.collect(
        ahead, kv, items, sequence, positions, tables.reshape(-1), 3, BLOCK_SIZE, BLOCK_STRIDE, LAYER_STRIDE, thread,
        threads,
    )  # fmt: skip
    offsets = ahead[a.FIRST : a.FIRST + ahead[a.PIECES]]
    return ahead, (offsets // (BLOCK_STRIDE * kv.itemsize)).tolist()


@pytest.mark.parametrize("element", [np.uint16, np.uint8])
def test_threads_share_the_blocks_that_are_there_before_the_batch_in_the_order_they_are_read(element: type) -> None:
    kv: np.ndarray = np.zeros(8 * BLOCK_STRIDE, element)
    # A prompt reads what lies before it, and the block that it begins in, once for all of its tiles.
    assert collected(kv, 0, 1)[1] == [7, 2, 5, 1, 6, 4]
    assert collected(kv, 0, 2)[1] == [7, 5, 1, 6]
    assert collected(kv, 1, 2)[1] == [2, 4]


def test_a_list_has_room_for_no_more_than_the_cache() -> None:
    kv = np.zeros(1, np.uint16)
    piece_nbytes = a.AHEAD_NBYTES // 4
    tables = np.arange(9, dtype=np.int32)
    ahead = np.zeros(a.AHEAD_LENGTH, np.int64)
    a.collect(
        ahead, kv, np.array([[0, 1]]), np.zeros(1, np.int64), np.array([8 * BLOCK_SIZE], np.int32), tables, 9,
        BLOCK_SIZE, piece_nbytes, piece_nbytes // 2, 0, 2,
    )  # fmt: skip
    assert ahead[a.PIECES] == 2


def test_pieces_are_walked_line_by_line_in_the_layer_aimed_at() -> None:
    kv = np.zeros(8 * BLOCK_STRIDE, np.uint16)
    ahead, blocks = collected(kv, 0, 2)
    windows = np.array([0, 0, 128], np.int64)
    a.aim(ahead, kv, 1, LAYERS, LAYER_STRIDE, windows)
    lines = LAYER_STRIDE * kv.itemsize // LINE_NBYTES
    start = kv.ctypes.data
    for block in blocks:
        for done in range(0, lines, 12):
            assert ahead[a.NEXT] < ahead[a.END]
            wanted = start + 2 * (block * BLOCK_STRIDE + LAYER_STRIDE) + done * LINE_NBYTES
            assert a.next_ahead(ahead, 12) == wanted
    assert ahead[a.NEXT] == ahead[a.END]


def test_nothing_is_fetched_for_a_layer_with_a_window_or_behind_the_last_one() -> None:
    kv = np.zeros(8 * BLOCK_STRIDE, np.uint16)
    ahead, _ = collected(kv, 0, 1)
    for layer in (2, LAYERS):
        a.aim(ahead, kv, layer, LAYERS, LAYER_STRIDE, np.array([0, 0, 128], np.int64))
        assert ahead[a.NEXT] == ahead[a.END]


@pytest.mark.parametrize("kind", [Q4_1, Q8_0])
@pytest.mark.parametrize("tokens", [1, MAX_TOKENS, 2 * MAX_TOKENS, 6 * MAX_TOKENS + 1])
def test_a_product_of_several_groups_of_tokens_works_off_the_list_and_gives_the_same(kind: int, tokens: int) -> None:
    random = np.random.default_rng(0)
    blocks, strips = 3, 4
    packed = pack_float(kind, random.standard_normal((strips * STRIP * ROWS, blocks * BLOCK), np.float32))
    kv = np.zeros(8 * BLOCK_STRIDE, np.uint16)
    full, _ = collected(kv, 0, 1)
    a.aim(full, kv, 0, LAYERS, LAYER_STRIDE, np.zeros(LAYERS, np.int64))
    x = random.standard_normal(tokens * blocks * BLOCK, np.float32)
    xq, xs, xpair = (np.zeros(n, t) for n, t in (
        (len(x), np.int8), (tokens * blocks, np.float32), (tokens * blocks, np.int32)
    ))  # fmt: skip
    quantize(x, 0, len(x), xq, 0, xs, xpair, 0)
    results = []
    for ahead in (np.zeros(a.AHEAD_LENGTH, np.int64), full):
        y = np.zeros(tokens * packed.tiles * ROWS, np.float32)
        gemm(
            packed.data, np.array([packed.kind, 0, packed.tiles, packed.inputs, -1]), np.zeros(1, np.float32), 0,
            strips, x, xq, xs, xpair, 0, tokens, y, 0, packed.tiles * ROWS, False, ahead,
        )  # fmt: skip
        results.append(y)
    assert results[0].tobytes() == results[1].tobytes()
    # With one group there is no time: memory is busy with the weights themselves.
    assert (full[a.NEXT] > a.FIRST) == (tokens > MAX_TOKENS)
