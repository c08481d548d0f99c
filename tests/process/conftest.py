"""Clusters that several modules share, because starting one costs seconds: TINY-KV on one pair and on two pairs of
workers, SCRIPT-B on one pair. Each module that uses one checks at its end that it is quiet again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.testing.process_cluster import ProcessCluster
from pdserve.testing.side_by_side import SHARED_CLUSTERS
from pdserve.testing.tiny_models import ScriptModel, TinyOptions, make_script_b, make_tiny_kv
from pdserve.testing.tiny_tokenizers import BOS, CHAT_TEMPLATE, END_OF_TURN, EOS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on shared clusters come last, so that no such cluster runs beside the tests that count processes.

    Side by side they come first, as they take longest: they stay together (`pdserve.testing.side_by_side`), and
    another process has the tests that count.
    """
    items.sort(
        key=lambda item: isinstance(item, pytest.Function) and bool(SHARED_CLUSTERS & set(item.fixturenames)),
        reverse="PYTEST_XDIST_WORKER" in os.environ,
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY-KV with a tokenizer that adds BOS and a chat template that writes BOS itself."""
    options = TinyOptions(add_bos=True, chat_template=CHAT_TEMPLATE)
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny-kv", options=options)


@pytest.fixture(scope="session")
def reference_model(tiny_model: Path) -> Any:
    """TINY-KV in transformers."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session")
def shared_one_pair(tiny_model: Path) -> Iterator[ProcessCluster]:
    """Started once; tests take `one_pair`. Its decode worker is small enough to be filled by a few requests."""
    with ProcessCluster(tiny_model, decode__max_batch_size=8, kv__num_blocks=1024) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shared_two_pairs(tiny_model: Path) -> Iterator[ProcessCluster]:
    """Started once; tests take `two_pairs`."""
    with ProcessCluster(tiny_model, local__prefill_workers=2, local__decode_workers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def one_pair(shared_one_pair: ProcessCluster) -> Iterator[ProcessCluster]:
    """TINY-KV on 1P+1D, quiet after the module, with the processes it was started with."""
    yield shared_one_pair
    shared_one_pair.assert_quiet()
    shared_one_pair.assert_alive()


@pytest.fixture(scope="module")
def two_pairs(shared_two_pairs: ProcessCluster) -> Iterator[ProcessCluster]:
    """TINY-KV on 2P+2D, quiet after the module, with the processes it was started with."""
    yield shared_two_pairs
    shared_two_pairs.assert_quiet()
    shared_two_pairs.assert_alive()


@pytest.fixture(scope="session")
def script_b_model(tmp_path_factory: pytest.TempPathFactory) -> ScriptModel:
    """Three scripts in one, each set off by its own token: `again`, `sam` and `go`. Every one ends with another EOS
    id, so BOS is one of them here. The tokenizer adds no BOS."""
    return make_script_b(
        tmp_path_factory.mktemp("model") / "script-b",
        start="again",
        script=(
            *("one", " tw", "o\n", "Obs", "erv", "ation:", " x"),
            *("sam", "a", "b", END_OF_TURN, "c", "d", BOS),
            *("go", "ok", "🌶", " end"),
        ),
        options=TinyOptions(eos_tokens=(EOS, END_OF_TURN, BOS)),
    )


@pytest.fixture(scope="session")
def shared_script_b(script_b_model: ScriptModel) -> Iterator[ProcessCluster]:
    """Started once; tests take `script_b`."""
    with ProcessCluster(script_b_model.directory, kv__num_blocks=64) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def script_b(shared_script_b: ProcessCluster) -> Iterator[ProcessCluster]:
    """SCRIPT-B on 1P+1D, quiet after the module, with the processes it was started with."""
    yield shared_script_b
    shared_script_b.assert_quiet()
    shared_script_b.assert_alive()
