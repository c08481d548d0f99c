"""Which attention backend serves on which device."""

from __future__ import annotations

import sys

import pytest
import torch

from pdserve.engine.attention import ReferenceAttention, SdpaAttention
from pdserve.engine.attention.choose import INTERPRET_ENV, choose_attention
from pdserve.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_auto_is_triton_on_a_gpu_and_sdpa_elsewhere() -> None:
    pytest.importorskip("triton")
    from pdserve.engine.attention.paged_triton import TritonAttention

    assert isinstance(choose_attention("auto", GPU, 4), TritonAttention)
    assert isinstance(choose_attention("auto", CPU, 4), SdpaAttention)


def test_names_are_what_they_say() -> None:
    assert isinstance(choose_attention("sdpa", GPU, 4), SdpaAttention)
    assert isinstance(choose_attention("reference", GPU, 4), ReferenceAttention)


def test_without_triton_a_gpu_gets_sdpa_unless_triton_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert isinstance(choose_attention("auto", GPU, 4), SdpaAttention)
    with pytest.raises(ConfigError, match="triton is not installed"):
        choose_attention("triton", GPU, 4)


def test_triton_is_refused_where_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERPRET_ENV, raising=False)
    with pytest.raises(ConfigError, match="device is cpu, and kernels are compiled for GPUs only; use sdpa") as info:
        choose_attention("triton", CPU, 4)
    assert info.value.field == "attention"
