"""The compiled Triton kernels, and prefill through varlen attention, against the reference and each other."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pdserve.engine.attention import SdpaAttention
from pdserve.engine.attention.paged_triton import TritonAttention
from pdserve.engine.attention.varlen import find_varlen
from pdserve.testing.attention_cases import make_attention_case, quantised, random_attention_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

SERVED = [(3000, 1), (0, 1), (511, 1), (512, 8), (40, 32), (1000, 300), (0, 700)]
"""Decode rows, drafts, a chunk with a prefix and a whole prompt, as a worker has them."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_any_small_batch_equals_the_reference(seed: int, dtype: torch.dtype) -> None:
    """NaN in any slot that no query sees would show."""
    case = random_attention_case(seed).to(DEVICE, dtype)
    attended = case.attend(TritonAttention(case.query.shape[1] // case.keys.shape[1]))
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(attended.float().cpu(), case.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised_keys_and_values_are_scaled(dtype: torch.dtype, codes: torch.dtype) -> None:
    case = quantised(make_attention_case([(60, 1), (17, 4), (20, 40)], heads=(8, 2), head_dim=64), codes)
    case = case.to(DEVICE, dtype)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        case.attend(TritonAttention(4)).float().cpu(), case.expected(), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 256])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((32, 8), 128), ((16, 16), 64), ((7, 1), 128)])
def test_a_served_batch_equals_sdpa(heads: tuple[int, int], head_dim: int, window: int, dtype: torch.dtype) -> None:
    """Larger than the reference can do; that of `sdpa` in float32 has been checked against it on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    case = make_attention_case(SERVED, heads=heads, head_dim=head_dim, window=window).to(DEVICE, dtype)
    expected = case.to(DEVICE, torch.float32).attend(SdpaAttention())
    tolerance = TOLERANCES[dtype]
    attended = case.attend(TritonAttention(heads[0] // heads[1]))
    torch.testing.assert_close(attended.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 256])
def test_varlen_attention_of_this_torch_equals_our_kernels(window: int, dtype: torch.dtype) -> None:
    """It aligns the last query with the last key, and counts a window as we believe it does."""
    varlen = find_varlen()
    if varlen is None:
        pytest.skip(f"torch {torch.__version__} has no varlen attention with windows and grouped heads")
    case = make_attention_case(SERVED, heads=(32, 8), head_dim=128, window=window).to(DEVICE, dtype)
    ours, theirs = (case.attend(TritonAttention(4, varlen=function)) for function in (None, varlen))
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(theirs.float(), ours.float(), atol=tolerance, rtol=tolerance)


def test_the_same_batch_gives_the_same_bits() -> None:
    case = make_attention_case(SERVED, heads=(32, 8), head_dim=128).to(DEVICE, torch.bfloat16)
    backend = TritonAttention(4)
    first = case.attend(backend)
    assert all(torch.equal(case.attend(backend), first) for _ in range(5))


def test_blocks_beyond_two_to_the_31_elements_are_reached() -> None:
    """Offsets in a pool of more than 4 GiB do not wrap."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    small = make_attention_case([(100, 1), (30, 40)], heads=(8, 2), head_dim=128).to(DEVICE, torch.float16)
    expected = small.attend(TritonAttention(4))
    num_blocks = (1 << 31) // (2 * 16 * 128) + 64
    far = [torch.empty((num_blocks, 2, 16, 128), dtype=torch.float16, device=DEVICE) for _ in range(2)]
    shift = num_blocks - len(small.keys)
    for pool, near in zip(far, (small.keys, small.values), strict=True):
        pool[shift:] = near
    table = small.batch.block_tables
    table += shift
    step = TritonAttention(4).plan(small.batch, 16, DEVICE)
    assert torch.equal(step(small.query, far[0], far[1]), expected)
