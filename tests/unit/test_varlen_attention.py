"""Prefill through varlen attention, with a function on the CPU that has the contract of torch's."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch

pytest.importorskip("triton")

from pdserve.engine.attention.paged_triton import TritonAttention
from pdserve.engine.attention.tiles import KernelSizes
from pdserve.engine.attention.varlen import find_varlen, is_usable
from pdserve.testing.attention_cases import make_attention_case

CPU = torch.device("cpu")
SIZES = KernelSizes(short_query=4, short_rows=16, long_rows=32, keys=16, max_splits=1)


class DenseVarlen:
    """`VarlenFunction` by plain softmax over each sequence; keeps what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, tuple[int, int]]] = []

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> torch.Tensor:
        self.calls.append((len(query), len(key), window_size))
        left, right = window_size
        assert right == 0 and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert enable_gqa == (query.shape[1] != key.shape[1])
        parts = []
        for i in range(len(cu_seq_q) - 1):
            q = query[cu_seq_q[i] : cu_seq_q[i + 1]].float()
            k, v = (t[cu_seq_k[i] : cu_seq_k[i + 1]].float() for t in (key, value))
            assert len(q) <= max_q and len(k) <= max_k
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
            # The last query is aligned with the last key.
            behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
            visible = (behind >= 0) & ((behind <= left) | (left < 0))
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(parts).to(query.dtype)


LENGTHS = [(30, 1), (0, 9), (21, 12)]
"""A decode row, which is not varlen's, a whole prompt, and a chunk with a prefix."""


@pytest.mark.parametrize(("window", "num_keys"), [(0, 9 + 33), (10, 9 + 12 + 9)])
def test_long_queries_go_through_varlen_and_the_rest_through_the_kernels(window: int, num_keys: int) -> None:
    """With a window only keys that some query sees are gathered: the blocks before may be anybody's."""
    varlen = DenseVarlen()
    case = make_attention_case(LENGTHS, block_size=8, window=window).to(CPU, torch.float16)
    attended = case.attend(TritonAttention(2, varlen=varlen, sizes=SIZES))
    torch.testing.assert_close(attended.float(), case.expected(), atol=4e-3, rtol=4e-3)
    assert varlen.calls == [(9 + 12, num_keys, (window - 1 if window else -1, 0))]


def test_what_varlen_cannot_compute_goes_through_the_kernels() -> None:
    """float32, and sinks."""
    varlen = DenseVarlen()
    whole = make_attention_case(LENGTHS[1:])
    with_sinks = make_attention_case(LENGTHS[1:], window=10, sinks=3).to(CPU, torch.float16)
    for case, tolerance in ((whole, 1e-5), (with_sinks, 4e-3)):
        attended = case.attend(TritonAttention(2, varlen=varlen, sizes=SIZES))
        torch.testing.assert_close(attended.float(), case.expected(), atol=tolerance, rtol=tolerance)
    assert varlen.calls == []


def test_varlen_is_found_by_the_parameters_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first releases of it knew neither grouped heads nor windows."""

    def first(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):  # type: ignore[no-untyped-def]
        return query

    assert is_usable(DenseVarlen()) and not is_usable(first)
    name = "torch.nn.attention.varlen"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(varlen_attn=first))
    assert find_varlen() is None
    usable = DenseVarlen()
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(varlen_attn=usable))
    assert find_varlen() is usable
    monkeypatch.setitem(sys.modules, name, None)
    assert find_varlen() is None


def test_the_varlen_attention_of_this_torch_is_usable() -> None:
    """Where it is there: on a GPU prefill would else fall back without anybody noticing."""
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ModuleNotFoundError:
        pytest.skip("this torch has none")
    assert find_varlen() is module.varlen_attn
