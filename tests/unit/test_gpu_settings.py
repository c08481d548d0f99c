"""What a configuration makes of a GPU: how its memory is shared out, and which steps are captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import pdserve.worker.model
from pdserve.config import Config
from pdserve.engine.attention import SdpaAttention
from pdserve.engine.gpu import check_kv_dtype, largest_batch, measured_pool_nbytes
from pdserve.engine.llama import Llama
from pdserve.engine.loader import load_engine
from pdserve.engine.memory_profile import MemoryProfiler
from pdserve.engine.parallel.loader import load_parallel_engine
from pdserve.engine.sizes import StepLimits
from pdserve.engine.weights import load_weights
from pdserve.errors import ConfigError
from pdserve.kv_layout import KvLayout
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.fake_memory import FakeMemory
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.worker.model import load_model

LIMITS = StepLimits(max_tokens=20, max_rows=3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    shape = TinyShape(num_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1)
    return open_model(str(make_tiny_kv(tmp_path_factory.mktemp("gpu") / "model", shape=shape)))


def test_the_largest_batch_has_the_most_tokens_rows_and_context() -> None:
    batch = largest_batch(LIMITS, 100, 16)
    assert batch.num_tokens == 20 + 2 and len(batch.logit_rows) == 3
    assert batch.context_lens.max() == 100 and batch.positions.max() == 99
    assert not batch.sampling.is_greedy.any()
    assert np.all(batch.block_tables == 0), "the pool has one block"


def test_the_pool_is_what_the_weights_and_a_real_step_leave(source: ModelSource) -> None:
    """The model runs on the CPU, and the memory is that of the fake."""
    config, memory, cpu = source.config, FakeMemory(), torch.device("cpu")
    profiler = MemoryProfiler(memory)
    weights = load_weights(source, torch.float32, cpu)
    memory.use(20)
    layout = KvLayout(dtype="float32", block_size=16, num_layers=1, num_kv_heads=1, head_dim=config.head_dim)
    seen: list[tuple[int, int]] = []

    class Watched(Llama):
        """Takes 15 bytes for a step."""

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append((len(hidden), self.num_positions))
            memory.use(15)
            memory.use(-15)
            return super().logits(hidden)

    nbytes = measured_pool_nbytes(
        profiler,
        0.8,
        LIMITS,
        config=config,
        make_model=lambda num_positions: Watched(config, weights, num_positions),
        layout=layout,
        attention=SdpaAttention(),
        device=cpu,
    )
    assert seen == [(3, config.max_position_embeddings)]
    assert nbytes == 80 - 20 - 15


def test_measuring_is_refused_without_a_gpu(source: ModelSource) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_fraction: device is cpu, which is not a GPU"):
        load_engine(source, gpu_memory_fraction=0.9)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_fp8_kv_is_refused_on_gpus_whose_kernels_cannot_read_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kv_dtype: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if capability == (8, 0) and kv_dtype == "float8_e4m3":
        with pytest.raises(ConfigError, match=r"kv_dtype: float8_e4m3 needs .* 8\.9 .* and cuda has 8\.0; use int8"):
            check_kv_dtype(kv_dtype, torch.device("cuda"))
    else:
        check_kv_dtype(kv_dtype, torch.device("cuda"))


class AcceptedError(Exception):
    """The checks before anything is started have come to an end."""


@pytest.mark.parametrize(
    ("attention", "kv_dtype", "refused"),
    [
        ("auto", "float8_e4m3", True),
        ("triton", "float8_e4m3", True),
        ("sdpa", "float8_e4m3", False),
        ("auto", "int8", False),
        ("auto", None, False),
    ],
)
def test_fp8_kv_is_refused_before_ranks_start_if_the_gpu_of_any_cannot_read_it(
    monkeypatch: pytest.MonkeyPatch, source: ModelSource, attention: str, kv_dtype: str | None, refused: bool
) -> None:
    def accept(*_: object) -> None:
        raise AcceptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index else (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", accept)
    with pytest.raises(ConfigError if refused else AcceptedError) as caught:
        load_parallel_engine(source, 2, device="cuda", num_blocks=4, attention=attention, kv_dtype=kv_dtype)
    if isinstance(caught.value, ConfigError):
        assert caught.value.field == "kv_dtype"
        assert "cuda:1 has 8.0" in caught.value.message


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"engine": {"device": "cpu"}}, "is for engine.device cuda"),
        ({"engine": {"kind": "cpu"}}, "is for engine.device cuda"),
        ({"engine": {"tensor_parallel": 2}}, "not with engine.tensor_parallel"),
        ({"decode": {"speculation": {"draft_model": "small.gguf"}}}, "not with decode.speculation.draft_model"),
        ({"kv": {"num_blocks": 5}}, "leave one out"),
    ],
)
def test_a_fraction_of_memory_goes_with_one_gpu_and_one_model(tree: Mapping[str, Any], problem: str) -> None:
    whole = {**tree, "engine": {"device": "cuda", **tree.get("engine", {})}}
    whole["kv"] = {"gpu_memory_fraction": 0.9, **tree.get("kv", {})}
    with pytest.raises(ValueError, match=problem):
        Config.model_validate(whole)


@pytest.mark.parametrize(
    ("decodes", "decode", "limits", "graph_tokens"),
    [
        (False, {}, StepLimits(max_tokens=700, max_rows=256), 0),
        (True, {"max_batch_size": 24}, StepLimits(max_tokens=300, max_rows=128), 128),
        (True, {"max_batch_size": 200}, StepLimits(max_tokens=300, max_rows=200), 200),
        (
            True,
            {"max_batch_size": 24, "speculation": {"method": "off"}},
            StepLimits(max_tokens=300, max_rows=24),
            24,
        ),
    ],
)
def test_each_role_keeps_memory_for_its_own_steps_and_decode_workers_capture_theirs(
    monkeypatch: pytest.MonkeyPatch,
    source: ModelSource,
    decodes: bool,
    decode: dict[str, Any],
    limits: StepLimits,
    graph_tokens: int,
) -> None:
    asked: dict[str, Any] = {}

    def load(source: ModelSource, **settings: Any) -> object:
        asked.update(settings)
        return object()

    monkeypatch.setattr(pdserve.worker.model, "open_served_model", lambda config: source)
    monkeypatch.setattr(pdserve.worker.model, "load_engine", load)
    tree: dict[str, dict[str, Any]] = {
        "engine": {"device": "cuda"},
        "kv": {"gpu_memory_fraction": 0.9},
        "prefill": {"max_batch_tokens": 700},
        "decode": {"max_batch_tokens": 300, **decode},
    }
    load_model(Config.model_validate(tree), decodes=decodes)
    assert (asked["limits"], asked["graph_tokens"], asked["gpu_memory_fraction"]) == (limits, graph_tokens, 0.9)
    assert asked["num_blocks"] is None and asked["kv_cache_bytes"] is None

    tree["engine"]["cuda_graphs"] = False
    load_model(Config.model_validate(tree), decodes=decodes)
    assert asked["graph_tokens"] == 0
