"""What the CPU engine does before a step: rows of the stored embedding, and a look at what the batch points to."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from pdserve.engine.cpu.embeddings import MOST_TOKENS, Embeddings
from pdserve.engine.cpu.entry import NO_BLOCK, NO_POSITION, NO_TOKEN, fetch_f16, prepare
from pdserve.model.gguf_types import TENSOR_TYPES
from pdserve.model.tensors import StoredTensor

BY_NAME = {t.name: t for t in TENSOR_TYPES.values()}
VOCAB, HIDDEN, STRIDE = 96, 64, 80


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("num_tokens", [1, 7, MOST_TOKENS, MOST_TOKENS + 1])
def test_rows_are_those_of_the_format_bit_for_bit_however_many(type_name: str, num_tokens: int) -> None:
    weights = np.random.default_rng(1).standard_normal((VOCAB, HIDDEN), dtype=np.float32)
    kind = gguf.GGMLQuantizationType[type_name]
    packed = gguf.quants.quantize(weights, kind)
    data = np.frombuffer(packed.tobytes(), np.uint8)
    stored = StoredTensor(name="w", type=BY_NAME[type_name], shape=(VOCAB, HIDDEN), data=data, file=Path("model.gguf"))
    token_ids = np.random.default_rng(num_tokens).integers(0, VOCAB, num_tokens, dtype=np.int32)
    x = np.full((MOST_TOKENS + 1) * STRIDE, 7.0, np.float32)
    Embeddings(stored).fetch(token_ids, x, STRIDE)
    rows = x.reshape(-1, STRIDE)
    expected = gguf.quants.dequantize(packed, kind).astype(np.float32)[token_ids]
    assert rows[:num_tokens, :HIDDEN].tobytes() == expected.tobytes()
    assert (rows[:num_tokens, HIDDEN:] == 7.0).all() and (rows[num_tokens:] == 7.0).all(), "nothing else is touched"


def test_every_float16_is_read_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)[None]
    x = np.empty(1 << 16, np.float32)
    fetch_f16(bits, np.zeros(1, np.int32), x, 1 << 16)
    expected = bits.view(np.float16).astype(np.float32)[0]
    is_nan = np.isnan(expected)
    assert x[~is_nan].tobytes() == expected[~is_nan].tobytes() and np.isnan(x[is_nan]).all()


def prepared(token_id: int = 5, position: int = 9, slot: int = 3) -> tuple[int, list[int]]:
    """Of three tokens, of which the last one is this."""
    sequence, items = np.full(3, -1, np.int64), np.zeros((3, 2), np.int64)
    number = prepare(
        np.array([1, 2, token_id], np.int32), np.array([0, 1, position], np.int32), np.array([0, 1, slot], np.int64),
        np.array([0, 2, 3], np.int32), 100, 50, 64, 1, sequence, items,
    )  # fmt: skip
    return number, sequence.tolist()


def test_tokens_are_told_to_which_sequence_they_belong() -> None:
    assert prepared() == (2, [0, 0, 1])


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"token_id": -1}, NO_TOKEN),
        ({"token_id": 100}, NO_TOKEN),
        ({"position": 50}, NO_POSITION),
        ({"slot": 64}, NO_BLOCK),
    ],
)
def test_what_does_not_exist_is_not_computed(wrong: dict[str, int], found: int) -> None:
    number, _ = prepared(**wrong)
    assert number == found
