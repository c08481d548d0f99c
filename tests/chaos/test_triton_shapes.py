"""The Triton kernels against the plain reference over many random shapes, which takes minutes in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pdserve.engine.attention.paged_triton import TritonAttention
from pdserve.engine.attention.tiles import KernelSizes
from pdserve.testing.attention_cases import quantised, random_attention_case

pytestmark = [pytest.mark.chaos, pytest.mark.long]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("seed", range(100, 160))
def test_any_batch_equals_the_reference(seed: int) -> None:
    """Exact and quantised in turn; tiles, keys at a time and splits change with the seed, too."""
    case = random_attention_case(seed)
    if seed % 3:
        case = quantised(case, (torch.int8, torch.float8_e4m3fn)[seed % 2])
    case = case.to(DEVICE, torch.float32)
    sizes = KernelSizes(short_query=8, short_rows=16 << seed % 2, long_rows=32, keys=16, max_splits=1 << seed % 4)
    attended = case.attend(TritonAttention(case.query.shape[1] // case.keys.shape[1], sizes=sizes))
    torch.testing.assert_close(attended.cpu(), case.expected(), atol=2e-6, rtol=2e-5)
