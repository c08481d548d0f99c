"""Greedy tokens from transformers, the independent reference, and from one of our engines in this process.

Parity is asserted on prompts whose reference has no near tie: two correct implementations may differ in the last bits
of a logit, and where the two best logits are closer than that, either token is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdserve.engine.batch import SampleRequest, SequenceChunk, build_batch
from pdserve.engine.engine import Engine
from pdserve.model.config import ModelConfig
from pdserve.model.rope_scaling import FrequencyFactors, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from pdserve.model.source import ModelSource
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    import torch

MIN_GAP = 0.01
"""Least difference between the two best logits, at every compared step, for a prompt to count."""

_REFERENCE_BATCH = 32


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """What transformers generates after one prompt."""

    ids: tuple[int, ...]
    min_gap: float
    """Least difference between the two best logits over all steps."""

    @property
    def is_clear(self) -> bool:
        """Whether no step was a near tie."""
        return self.min_gap >= MIN_GAP


def transformers_model(source: ModelSource) -> Any:
    """A float32 model of transformers holding the (dequantised) weights of `source`.

    Any type, as transformers is not typed. Its own GGUF loader would be another reading of the file, but takes minutes.
    """
    import torch
    import transformers

    config = source.config
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta} | _rope_parameters(config.rope_scaling),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    with torch.device("meta"):
        model: Any
        if config.qk_norm:
            model = transformers.Qwen3ForCausalLM(
                transformers.Qwen3Config(**settings, **_optional_windows(config), attention_bias=config.output_bias)
            )
        elif config.qkv_bias and not config.output_bias:
            model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings, **_optional_windows(config)))
        elif config.layer_windows:
            assert len(set(config.layer_windows)) == 1 and not config.qkv_bias, "transformers has no such model"
            model = transformers.MistralForCausalLM(
                transformers.MistralConfig(**settings, sliding_window=config.layer_windows[0])
            )
        else:
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**settings, attention_bias=config.output_bias)
            )
    weights = {name: torch.from_numpy(source.tensor(name)) for name in source.tensor_names()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    # The inverse frequencies are a buffer that no checkpoint holds, so `meta` leaves them without a value.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.load_state_dict(weights, assign=True, strict=True)
    model.eval()
    return model


def _optional_windows(config: ModelConfig) -> dict[str, Any]:
    """The keys of models whose layers may differ."""
    if not config.layer_windows:
        return {}
    types = ["sliding_attention" if window else "full_attention" for window in config.layer_windows]
    return {"use_sliding_window": True, "sliding_window": max(config.layer_windows), "layer_types": types}


def _rope_parameters(scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys that transformers knows a scaling by."""
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling():
            return {"rope_type": "linear"} | asdict(scaling)
        case Llama3Scaling():
            return {"rope_type": "llama3"} | asdict(scaling)
        case YarnScaling():
            return {"rope_type": "yarn"} | asdict(scaling)
        case FrequencyFactors():
            raise ValueError("transformers has no rotary embedding with a factor for each frequency")


def greedy_reference(model: Path | Any, prompts: Sequence[Sequence[int]], n: int) -> list[ReferenceOutput]:
    """`n` greedy tokens after each prompt by transformers in float32, EOS being a token like any other.

    `model` is a loaded transformers model or the directory of one. Prompts of similar length share a batch, padded on
    the left.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if isinstance(model, Path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        loaded.eval()
    else:
        loaded = model
    outputs: dict[int, ReferenceOutput] = {}
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with torch.inference_mode():
        for begin in range(0, len(by_length), _REFERENCE_BATCH):
            members = by_length[begin : begin + _REFERENCE_BATCH]
            ids, gaps = _greedy_group(loaded, [prompts[i] for i in members], n)
            for i, row, gap in zip(members, ids.tolist(), gaps.tolist(), strict=True):
                outputs[i] = ReferenceOutput(tuple(row), gap)
    return [outputs[i] for i in range(len(prompts))]


def _greedy_group(model: Any, prompts: Sequence[Sequence[int]], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy ids [N, n] and least gaps [N] of one left-padded batch."""
    import torch
    from transformers import GenerationConfig

    width = max(len(p) for p in prompts)
    # A configuration of its own, as that of the model would stop at EOS.
    model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
    generated = model.generate(
        torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        do_sample=False,
        max_new_tokens=n,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(generated.logits, dim=1).topk(2).values
    return generated.sequences[:, width:], (best[..., 0] - best[..., 1]).amin(dim=1)


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """What transformers thinks of somebody's greedy continuation of a prompt."""

    wrong_step: int | None
    """First token that is not the best, although the best leads by `MIN_GAP`; None if there is none."""
    is_clear: bool
    """Every token is the best by at least `MIN_GAP`."""


def check_greedy(model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[GreedyCheck]:
    """Check whole continuations with one forward pass each: many times cheaper than `greedy_reference`.

    A continuation is the greedy one if and only if each token is the most likely after those before it. What follows
    a wrong token is not judged, as the reference would have gone elsewhere.
    """
    import torch

    checks = []
    with torch.inference_mode():
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = torch.tensor([[*prompt, *output[:-1]]])
            best = model(ids, logits_to_keep=len(output)).logits[0].topk(2)
            clear = (best.values[:, 0] - best.values[:, 1] >= MIN_GAP).tolist()
            right = (best.indices[:, 0] == torch.tensor(output)).tolist()
            first = next((i for i, r in enumerate(right) if not r), None)
            checks.append(
                GreedyCheck(
                    wrong_step=first if first is not None and clear[first] else None,
                    is_clear=first is None and all(clear),
                )
            )
    return checks


@dataclass(slots=True)
class _Running:
    """One sequence of `generate`."""

    tokens: list[int]
    block_table: list[int]
    num_computed: int = 0
    num_generated: int = 0


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    n: int,
    *,
    budget_tokens: int = 512,
    sampling: Sequence[SamplingParams] | None = None,
    block_seed: int = 0,
    start_steps: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """`n` tokens after each prompt by an engine in this process: chunked prefill and decode in the same batches.

    Each step takes one token of every sequence that decodes, then prompt tokens in order of arrival up to
    `budget_tokens`. Prompt i arrives at step `start_steps[i]` (0 if not given), and is greedy unless `sampling` says
    otherwise. Blocks are dealt in an order shuffled by `block_seed`, so a sequence's blocks lie all over the pool, used
    and unused ones mixed. The pool has to hold all sequences at once.
    """
    block_size = engine.layout.block_size
    params = sampling or [SamplingParams(temperature=0.0)] * len(prompts)
    starts = start_steps or [0] * len(prompts)
    shuffled = np.random.default_rng(block_seed).permutation(engine.num_blocks).tolist()
    running = []
    for prompt in prompts:
        count = engine.layout.num_blocks(len(prompt) + n)
        assert count <= len(shuffled), f"{engine.num_blocks} blocks do not hold all sequences at once"
        running.append(_Running(list(prompt), [shuffled.pop() for _ in range(count)]))
    step = 0
    while any(s.num_generated < n for s in running):
        chunks, scheduled = [], []
        left = budget_tokens
        arrived = [i for i, s in enumerate(running) if starts[i] <= step and s.num_generated < n]
        # Decoding sequences first: sorting is stable, so prompts keep their order.
        for i in sorted(arrived, key=lambda i: running[i].num_generated == 0):
            sequence = running[i]
            pending = len(sequence.tokens) - sequence.num_computed
            count = min(pending, max(left, 0)) if sequence.num_generated == 0 else pending
            if count == 0:
                continue
            left -= count
            begin = sequence.num_computed
            sequence.num_computed += count
            chunks.append(
                SequenceChunk(
                    token_ids=sequence.tokens[begin : begin + count],
                    start_position=begin,
                    block_table=sequence.block_table,
                    samples=(SampleRequest(params=params[i]),) if count == pending else (),
                )
            )
            if count == pending:
                scheduled.append(sequence)
        if chunks:
            drawn = engine.forward(build_batch(chunks, block_size)).token_ids
            for sequence, token_id in zip(scheduled, drawn.tolist(), strict=True):
                sequence.tokens.append(token_id)
                sequence.num_generated += 1
        step += 1
    return [tuple(s.tokens[len(p) :]) for s, p in zip(running, prompts, strict=True)]
