"""An engine with random weights of a published shape, made on the device: nothing to download, and no file to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from benchmarks.on_gpu.figures import BLOCK_SIZE
from pdserve.engine.attention import AttentionBackend
from pdserve.engine.batch import Batch, SampleRequest, SequenceChunk, build_batch
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.graphs import Recorder, StaticAttention, capture_steps
from pdserve.engine.llama import Llama
from pdserve.engine.loader import kv_layout
from pdserve.engine.torch_engine import TorchEngine
from pdserve.engine.weights import LayerWeights, LlamaWeights
from pdserve.model.config import ModelConfig
from pdserve.types import SamplingParams


def llama_shape(*, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """A Llama 3 with these sizes."""
    return ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
    )


SHAPES = {
    "8b": llama_shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128),
    "1b": llama_shape(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, head_dim=64),
}


class Device(Protocol):
    """Where the engine computes."""

    @property
    def device(self) -> torch.device:
        """Of all tensors."""

    def synchronize(self) -> None:
        """Wait for everything that was submitted."""

    def recorder(self) -> Recorder:
        """Captures steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Random weights and what is known of them."""

    config: ModelConfig
    weights: LlamaWeights

    @classmethod
    def random(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
        """Small enough that nothing overflows; the values do not matter."""

        def matrix(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=dtype, device=device) * 0.02

        def layer() -> LayerWeights:
            return LayerWeights(
                input_norm=torch.ones(config.hidden_size, dtype=dtype, device=device),
                qkv=matrix(config.q_size + 2 * config.kv_size, config.hidden_size),
                qkv_bias=None,
                qk_norm=None,
                output=matrix(config.hidden_size, config.q_size),
                output_bias=None,
                post_attention_norm=torch.ones(config.hidden_size, dtype=dtype, device=device),
                gate_up=matrix(2 * config.intermediate_size, config.hidden_size),
                down=matrix(config.hidden_size, config.intermediate_size),
            )

        embedding = matrix(config.vocab_size, config.hidden_size)
        weights = LlamaWeights(
            embedding=embedding,
            layers=tuple(layer() for _ in range(config.num_layers)),
            norm=torch.ones(config.hidden_size, dtype=dtype, device=device),
            lm_head=embedding,
        )
        return cls(config=config, weights=weights)

    @property
    def layer_elements(self) -> int:
        """Numbers in the matrices of all layers: as many products and sums for each token."""
        return sum(
            w.numel() for layer in self.weights.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )

    @property
    def head_elements(self) -> int:
        """Numbers in the LM head."""
        return self.weights.lm_head.numel()


class GpuRig:
    """One model with its pool, which an eager engine and one with graphs share."""

    def __init__(
        self, model: Model, attention: AttentionBackend, on: Device, *, num_blocks: int, dtype: str, graph_tokens: int
    ) -> None:
        self.model = model
        self.on = on
        layout = kv_layout(model.config, BLOCK_SIZE, dtype)
        self.pool = BlockPool(layout, num_blocks + 1, on.device)
        llama = Llama(model.config, model.weights, min(model.config.max_position_embeddings, num_blocks * BLOCK_SIZE))
        self.eager = TorchEngine(model.config, llama, self.pool, attention)
        self.graphed: TorchEngine | None = None
        """None if the attention backend cannot be captured."""
        if isinstance(attention, StaticAttention):
            with torch.inference_mode():
                graphs = capture_steps(llama, self.pool, attention, on.recorder(), graph_tokens)
            self.graphed = TorchEngine(model.config, llama, self.pool, attention, graphs)
        self._blocks = np.random.default_rng(0).permutation(num_blocks).tolist()

    def decode_batch(self, size: int, context: int) -> Batch:
        """One token for each of `size` sequences of `context` tokens, in blocks all over the pool."""
        count = -(-context // BLOCK_SIZE)
        return self._batch([[0]] * size, context - 1, [self._blocks[i * count : (i + 1) * count] for i in range(size)])

    def prefill_batch(self, length: int) -> Batch:
        """A whole prompt, and its first token."""
        return self._batch([list(range(length))], 0, [self._blocks[: -(-length // BLOCK_SIZE)]])

    def step_times(self, engine: TorchEngine, batch: Batch, repeats: int) -> list[float]:
        """Seconds of each of `repeats` steps, as a worker sees them: to the tokens on the host."""
        return self.times(lambda: engine.forward(batch), repeats)

    def times(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Seconds of `work`, after three times that do not count."""
        times = []
        for i in range(3 + repeats):
            self.on.synchronize()
            begin = time.perf_counter()
            work()
            self.on.synchronize()
            if i >= 3:
                times.append(time.perf_counter() - begin)
        return times

    def _batch(self, tokens: Sequence[list[int]], start: int, tables: Sequence[list[int]]) -> Batch:
        request = SampleRequest(params=SamplingParams(temperature=0.0))
        return build_batch(
            [
                SequenceChunk(token_ids=ids, start_position=start, block_table=table, samples=(request,))
                for ids, table in zip(tokens, tables, strict=True)
            ],
            BLOCK_SIZE,
        )
