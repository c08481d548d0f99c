"""Every architecture we serve gives the tokens of transformers, from checkpoints that transformers made and saved.

Prompts with a near tie in the reference are left out (see `pdserve.testing.reference`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine import load_engine
from pdserve.model.source import open_model
from pdserve.testing.reference import check_greedy, generate, greedy_reference, transformers_model
from pdserve.testing.tiny_families import ROPE_SCALINGS, make_tiny_family
from pdserve.testing.tiny_gguf import write_gguf

NUM_NEW_TOKENS = 8
LENGTHS = (3, 16, 33, 90, 150)
"""The longest reach beyond the 64 tokens that the scaled models were "first trained" with."""

THETA = {"rope_theta": 10000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention biases": ("llama", {"attention_bias": True}),
    "llama, head_dim 80 of 4 heads": ("llama", {"head_dim": 80, "intermediate_size": 200}),
    "llama, head_dim 24, 8 heads on 1": ("llama", {"head_dim": 24, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "mistral, head_dim 32": ("mistral", {"head_dim": 32, "num_key_value_heads": 4}),
    "mistral, window as long as the context": ("mistral", {"sliding_window": 512}),
    "mistral, window of 20": ("mistral", {"sliding_window": 20}),
    "phi3, window of 65": ("phi3", {"sliding_window": 65}),
    "qwen2, window of 40 from the second layer on": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, tied, 7 heads on 1": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "hidden_size": 7 * 16,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, tied, head_dim 128, biases": (
        "qwen3",
        {"head_dim": 128, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
    ),
    "phi3": ("phi3", {}),
    "phi3, head_dim 96": ("phi3", {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}),
}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama, {kind}": ("llama", {"rope_parameters": THETA | rope}) for kind, rope in ROPE_SCALINGS.items()},
    "qwen2, yarn without truncation": (
        "qwen2",
        {"rope_parameters": THETA | ROPE_SCALINGS["yarn"] | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0}},
    ),
    "qwen3, yarn with an attention factor": (
        "qwen3",
        {"rope_parameters": THETA | ROPE_SCALINGS["yarn"] | {"attention_factor": 1.4}},
    ),
    "mistral, yarn with mscale": (
        "mistral",
        {"rope_parameters": THETA | ROPE_SCALINGS["yarn"] | {"mscale": 1.5, "mscale_all_dim": 0.7}},
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def clear_reference(directory: Path, seed: int = 0) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Prompts of all lengths whose greedy continuation by transformers has no near tie, and the continuations."""
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab_size, size=n).tolist() for n in LENGTHS * 3]
    outputs = greedy_reference(directory, prompts, NUM_NEW_TOKENS)
    clear = [i for i, output in enumerate(outputs) if output.is_clear]
    assert len(clear) >= 5
    assert max(len(prompts[i]) for i in clear) == max(LENGTHS)
    return [prompts[i] for i in clear], [outputs[i].ids for i in clear]


def our_tokens(model: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Prefill in chunks, among decode rows."""
    engine = load_engine(open_model(str(model)), num_blocks=12 * len(prompts))
    return generate(engine, prompts, NUM_NEW_TOKENS, budget_tokens=100)


@pytest.mark.parametrize("case", [*FAMILIES, *SCALED])
def test_tokens_equal_transformers(tmp_path: Path, case: str) -> None:
    family, config = (FAMILIES | SCALED)[case]
    directory = make_tiny_family(tmp_path / "model", family, **config)
    prompts, expected = clear_reference(directory)
    assert our_tokens(directory, prompts) == expected


@pytest.mark.parametrize("case", SCALED)
def test_scaled_rotary_embedding_decides_the_tokens(tmp_path: Path, case: str) -> None:
    """The control of the above: the same weights without the scaling say something else."""
    family, config = SCALED[case]
    directory = make_tiny_family(tmp_path / "model", family, **config)
    prompts, expected = clear_reference(directory)
    stored = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(stored | {"rope_parameters": THETA}))
    plain = our_tokens(directory, prompts)
    differing = [len(p) for p, ours, theirs in zip(prompts, plain, expected, strict=True) if ours != theirs]
    assert max(LENGTHS) in differing


@pytest.mark.parametrize(
    "case", ["qwen2", "qwen3, tied, head_dim 128, biases", "llama, attention biases", "llama, yarn"]
)
def test_the_reference_made_of_our_weights_is_the_stored_model(tmp_path: Path, case: str) -> None:
    """Tests of other engines and of quantised files compare with it."""
    family, config = (FAMILIES | SCALED)[case]
    directory = make_tiny_family(tmp_path / "model", family, **config)
    prompts, expected = clear_reference(directory)
    checks = check_greedy(transformers_model(open_model(str(directory))), prompts, expected)
    assert all(c.wrong_step is None and c.is_clear for c in checks)


GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (FAMILIES | SCALED)[name]
    for name in (
        "llama",
        "llama, attention biases",
        "llama, head_dim 80 of 4 heads",
        "llama, linear",
        "llama, llama3",
        "llama, yarn",
        "mistral, head_dim 32",
        "mistral, window of 20",
        "phi3, window of 65",
        "qwen2, window of 40 from the second layer on",
        "qwen2",
        "qwen2, tied, 7 heads on 1",
        "qwen3",
        "phi3",
        "phi3, head_dim 96",
    )
} | {"qwen3, linear": ("qwen3", {"rope_parameters": THETA | ROPE_SCALINGS["linear"]})}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_gguf_file_gives_the_tokens_of_the_directory_it_was_made_from(tmp_path: Path, case: str) -> None:
    family, config = GGUF_CASES[case]
    directory = make_tiny_family(tmp_path / "model", family, **config)
    prompts, expected = clear_reference(directory)
    assert our_tokens(write_gguf(directory, tmp_path / "m.gguf"), prompts) == expected


@pytest.mark.parametrize(
    ("family", "weight_type"),
    [("llama", "Q4_K"), ("qwen2", "Q5_K"), ("qwen3", "Q6_K"), ("phi3", "Q4_K"), ("llama", "Q5_0"), ("phi3", "Q5_1")],
)
def test_a_quantised_gguf_file_gives_the_tokens_of_its_weights(tmp_path: Path, family: str, weight_type: str) -> None:
    """Row permutation and splitting of fused matrices act on packed rows of every block size."""
    directory = make_tiny_family(tmp_path / "model", family)
    source = open_model(str(write_gguf(directory, tmp_path / "m.gguf", weight_type=weight_type)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, source.config.vocab_size, size=n).tolist() for n in LENGTHS]
    outputs = generate(load_engine(source, num_blocks=60), prompts, NUM_NEW_TOKENS)
    checks = check_greedy(transformers_model(source), prompts, outputs)
    assert [c.wrong_step for c in checks] == [None] * len(checks)
    assert sum(c.is_clear for c in checks) >= 2
