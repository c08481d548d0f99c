"""Tiny random checkpoints of every architecture we serve, made and saved by transformers' own classes.

Nothing here knows how pdserve reads a model, so a checkpoint made here tests readers and engines against the
implementation that defines the architecture. As with TINY-KV, weights are wide enough that any slip changes the greedy
tokens; biases and norms are random as well, as transformers' initial zeros and ones would hide their absence.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.testing.tiny_tokenizers import (
    BOS,
    COMMON_PIECES,
    EOS,
    byte_level_tokenizer,
    save_tokenizer,
    token_id,
)

if TYPE_CHECKING:
    import torch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Every model_type that can be made."""

ROPE_SCALINGS: dict[str, dict[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
"""One of each kind, without `rope_theta`. Where there is an original length it is short, so that a test reaches well
beyond it, and the frequencies of a small head fall on both sides of the ramp and on it."""


def make_tiny_family(directory: Path, family: str, *, seed: int = 0, std: float = 0.1, **config: object) -> Path:
    """Write a checkpoint with a byte-level tokenizer; returns `directory`, which is made if needed.

    `config` overrides what transformers' configuration class is called with: `head_dim`, `rope_parameters`, ...
    Sizes are multiples of 256 where a GGUF file of any type needs it.
    """
    import torch
    import transformers

    tokenizer = byte_level_tokenizer(COMMON_PIECES)
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    }[family]
    values: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": None,
        "bos_token_id": token_id(tokenizer, BOS),
        "eos_token_id": token_id(tokenizer, EOS),
        "pad_token_id": None,
    }
    if family == "qwen3":
        values["head_dim"] = 64  # This class does not derive it from hidden_size.
    model: Any = model_class(config_class(**(values | config)))
    _randomise(model, seed, std)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory, chat_template=None)
    assert next(model.parameters()).dtype == torch.float32
    return directory


def _randomise(model: torch.nn.Module, seed: int, std: float) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                spread = 3 * std if name.endswith(".bias") else std
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
