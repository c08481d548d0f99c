"""The Triton kernels against the plain reference: in Triton's interpreter on the CPU (`tests/conftest.py`), compiled
where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.attention.paged_triton import TritonAttention
from pdserve.engine.attention.tiles import KernelSizes
from pdserve.testing.attention_cases import AttentionCase, make_attention_case, quantised, random_attention_case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = KernelSizes(short_query=8, short_rows=16, long_rows=32, keys=16, max_splits=4)
"""Several tiles and splits even in small cases, and few programs: the interpreter takes milliseconds for each."""


def attend(case: AttentionCase) -> torch.Tensor:
    return case.attend(TritonAttention(case.query.shape[1] // case.keys.shape[1], sizes=SMALL)).float().cpu()


def check(case: AttentionCase, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(attend(case), case.expected(), atol=tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("seed", range(4))
def test_any_batch_equals_the_reference(seed: int) -> None:
    """NaN in any slot that no query sees would show. Many more shapes: tests/chaos/test_triton_shapes.py."""
    check(random_attention_case(seed).to(DEVICE, torch.float32))


MIXED = [(50, 1), (0, 1), (17, 8), (20, 15)]
"""Decode rows far apart in length, one draft over two tiles, one prefill chunk."""


def test_a_mixed_batch_equals_the_reference() -> None:
    check(make_attention_case(MIXED, heads=(6, 2)).to(DEVICE, torch.float32))


def test_sinks_are_compared_with_a_query_of_their_own() -> None:
    case = make_attention_case(MIXED, block_size=8, heads=(6, 2), window=24, sinks=5, own_sink_query=True)
    check(case.to(DEVICE, torch.float32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_keys_and_values_are_scaled(dtype: torch.dtype) -> None:
    case = quantised(make_attention_case(MIXED[1:], block_size=8, heads=(6, 2), window=30), dtype)
    check(case.to(DEVICE, torch.float32))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter multiplies the bits of bfloat16"),
        ),
    ],
    ids=str,
)
def test_half_precision_equals_the_reference_within_its_resolution(dtype: torch.dtype) -> None:
    check(make_attention_case(MIXED, heads=(6, 2)).to(DEVICE, dtype), 4 * torch.finfo(dtype).eps)


def test_a_row_adds_up_alike_in_any_batch_with_as_many_splits() -> None:
    """Bit for bit: how the context is split does not depend on the other sequences' lengths."""
    alone, together = (
        make_attention_case(lengths, seed=3).to(DEVICE, torch.float32) for lengths in ([(75, 1)], [(75, 1), (9, 1)])
    )
    here, there = (torch.from_numpy(case.batch.block_tables[0]).long() for case in (alone, together))
    for source, target in ((alone.keys, together.keys), (alone.values, together.values)):
        target[there] = source[here]
    together.query[0] = alone.query[0]
    assert torch.equal(attend(together)[0], attend(alone)[0])
