"""Settings of the engine: what is wrong is said by name, and what is right gives the pool that was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine import SampleRequest, SequenceChunk, build_batch, load_engine
from pdserve.errors import ConfigError
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.types import SamplingParams


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_model(str(make_tiny_kv(tmp_path_factory.mktemp("tiny") / "model")))


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        ({"dtype": "float8"}, "dtype", "'float8' is not one of float32, float16, bfloat16"),
        ({"attention": "flash"}, "attention", "'flash' is not one of reference, sdpa"),
        ({"device": "gpu"}, "device", "'gpu' is not cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device", "'meta' is not supported"),
        ({"block_size": 0}, "block_size", "at least 1"),
        ({"num_threads": 0}, "num_threads", "at least 1"),
        ({"num_blocks": 0}, "num_blocks", "at least 1"),
        ({"num_blocks": None}, "num_blocks", "either num_blocks or kv_cache_bytes"),
        ({"kv_cache_bytes": 10**6}, "num_blocks", "either num_blocks or kv_cache_bytes"),
        ({"num_blocks": None, "kv_cache_bytes": 1000}, "kv_cache_bytes", "1000 holds no block"),
        ({"num_blocks": 10**9}, "num_blocks", "do not fit"),
        ({"num_blocks": None, "kv_cache_bytes": 10**15}, "kv_cache_bytes", "do not fit"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(source: ModelSource, settings: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine(source, **{"num_blocks": 4, **settings})
    assert caught.value.field == field
    assert says in caught.value.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_a_clear_error(source: ModelSource) -> None:
    with pytest.raises(ConfigError, match="finds no usable CUDA device"):
        load_engine(source, device="cuda", num_blocks=4)


def test_a_budget_in_bytes_gives_as_many_blocks_as_fit(source: ModelSource) -> None:
    block_nbytes = load_engine(source, num_blocks=1).layout.block_nbytes
    assert block_nbytes == 4 * 2 * 2 * 16 * 32 * 4
    assert load_engine(source, kv_cache_bytes=3 * block_nbytes + 5).num_blocks == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_near_float32(source: ModelSource, dtype: str) -> None:
    request = SampleRequest(params=SamplingParams(temperature=0.0))
    chunk = SequenceChunk(token_ids=list(range(2, 40)), start_position=0, block_table=[2, 0, 1], samples=(request,))
    batch = build_batch([chunk], 16)
    full, half = load_engine(source, num_blocks=3), load_engine(source, num_blocks=3, dtype=dtype)
    assert half.layout.dtype == dtype
    assert half.layout.block_nbytes * 2 == full.layout.block_nbytes
    expected = full.forward_logits(batch)
    error = np.abs(half.forward_logits(batch) - expected).max() / expected.std()
    assert error < 60 * float(torch.finfo(getattr(torch, dtype)).eps), error


def test_a_batch_that_needs_no_logits_only_fills_its_slots(source: ModelSource) -> None:
    engine = load_engine(source, num_blocks=3)
    batch = build_batch([SequenceChunk(token_ids=[5] * 20, start_position=0, block_table=[2, 0])], 16)
    assert engine.forward(batch).token_ids.shape == (0,)
    filled = [
        bool(np.frombuffer(view, dtype=np.float32).any()) for b in range(3) for view in engine.store.read([b], 0, 4)
    ]
    assert filled == [True, False, True]


def test_token_ids_outside_the_vocabulary_never_reach_the_model(source: ModelSource) -> None:
    engine = load_engine(source, num_blocks=3)
    for token_id in (-1, source.config.vocab_size):
        with pytest.raises(AssertionError, match="no such token id"):
            engine.forward(build_batch([SequenceChunk(token_ids=[token_id], start_position=0, block_table=[0])], 16))


def test_schedulers_import_the_engine_package_without_torch() -> None:
    code = "import sys, pdserve.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path.cwd(), timeout=60, check=False).returncode == 0
