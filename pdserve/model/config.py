"""What a model is, whichever file it came from: the numbers the forward pass, the KV layout and the stop rules need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.kv_window import KvWindow
from pdserve.model.fields import Fields
from pdserve.model.rope_scaling import RopeScaling

MAX_LAYERS = 1024
"""More than any published model; keeps a damaged file from sending loops over layers astray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family.

    RMSNorm before attention and MLP, rotary embedding over the whole head in the half-split order, grouped-query
    attention with scores scaled by 1 / sqrt(head_dim), SiLU-gated MLP. What members of the family have beyond the
    first Llama is in fields of its own, whose defaults mean "has not".
    """

    architecture: str
    """Which forward pass this is. "llama" is the only one: other members of the family differ in the fields below."""
    vocab_size: int
    """Rows of the embedding and of the LM head: every token id is below it."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; `num_heads` is a multiple of it."""
    head_dim: int
    """Not necessarily hidden_size / num_heads."""
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    """Longest sequence, prompt and output together, in tokens."""
    tie_word_embeddings: bool
    """The embedding is also the LM head, and there is no `lm_head.weight`."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends the output by default, without repeats; may be empty."""
    qkv_bias: bool = False
    """The query, key and value projections add a bias (Qwen2), before any norm and before rotary embedding."""
    output_bias: bool = False
    """The attention output projection adds a bias."""
    qk_norm: bool = False
    """Queries and keys get an RMSNorm over each head, one weight [head_dim] for all heads of a kind, before rotary
    embedding (Qwen3)."""
    layer_windows: tuple[int, ...] = ()
    """Of each layer how many keys a query sees, the last ones with its own; 0 is all of them. Empty if every layer sees
    all."""
    attention_sinks: int = 0
    """Leading positions that every query sees beside its window. Only where every layer has one; a query beyond the
    window is compared with them as if it were at position `attention_sinks` + window - 1."""
    rope_scaling: RopeScaling | None = None
    """How rotary embedding is stretched. Engines do not look at it: `pdserve.model.rope` has the tables."""

    @property
    def q_size(self) -> int:
        """Width of the queries of one token, all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values, of one token, all heads."""
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int:
        """Keys that a query of this layer sees; 0 is all of them."""
        return self.layer_windows[layer] if self.layer_windows else 0

    @property
    def kv_window(self) -> KvWindow:
        """Which KV some layer may still read."""
        full = not self.layer_windows or 0 in self.layer_windows
        return KvWindow(0 if full else max(self.layer_windows), self.attention_sinks)

    def require_consistent(self, fields: Fields, keys: Mapping[str, str]) -> None:
        """Raise ModelLoadError if the numbers contradict each other.

        `fields` is the file they came from, and `keys` maps names of this class to the file's own, for the message.
        """
        if self.num_layers > MAX_LAYERS:
            fields.fail(keys["num_layers"], f"is {self.num_layers}; at most {MAX_LAYERS} layers are supported")
        if self.num_heads % self.num_kv_heads:
            fields.fail(keys["num_heads"], f"is {self.num_heads}, not a multiple of the {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            fields.fail(keys["head_dim"], f"is {self.head_dim}; rotary embedding needs an even head size")
        if self.bos_token_id is not None and self.bos_token_id >= self.vocab_size:
            fields.fail(keys["bos_token_id"], f"is {self.bos_token_id}, outside the vocabulary of {self.vocab_size}")
        for token_id in self.eos_token_ids:
            if token_id >= self.vocab_size:
                fields.fail(keys["eos_token_ids"], f"has {token_id}, outside the vocabulary of {self.vocab_size}")
