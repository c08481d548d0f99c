"""From a part's settings to its weights and pool: the same for rank 0 and the followers, which get theirs as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pdserve.engine.attention.choose import choose_attention
from pdserve.engine.block_pool import BlockPool, CudaStaging, StagedBlockStore
from pdserve.engine.device import TORCH_DTYPES
from pdserve.engine.host_store import HostBlockStore
from pdserve.engine.llama import Llama
from pdserve.engine.parallel.collectives import Collectives, VocabRanks
from pdserve.engine.parallel.draw import Vocabulary
from pdserve.engine.parallel.part_source import PartSource
from pdserve.engine.parallel.partition import Part, partition
from pdserve.engine.parallel.rank_model import RankModel
from pdserve.engine.shared_pool import PoolMemory
from pdserve.engine.weights import LlamaWeights, load_weights
from pdserve.kv_layout import KvBlockStore, KvLayout
from pdserve.kv_window import KvWindow
from pdserve.model.config import ModelConfig
from pdserve.model.source import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    """What a rank has to know to load its part."""

    rank: int
    size: int
    device: str
    dtype: str
    """Of weights and activations."""
    attention: str
    layout: KvLayout
    """Of the blocks of all ranks together."""
    num_blocks: int
    layer_windows: tuple[int, ...]
    """See `ModelConfig`: what the operator has set may differ from what the model's files say."""
    attention_sinks: int
    """The same."""
    max_position_embeddings: int
    """The same."""
    num_positions: int
    """Length of the longest sequence."""
    num_threads: int | None
    """CPU threads of this rank; None leaves torch's choice."""
    timeout_s: float
    """Longest wait for the other ranks within a step."""

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PartSettings:
        """The settings again. Raises TypeError or KeyError for a value that `to_json` has not made."""
        layout: dict[str, Any] = dict(value["layout"])
        layout |= {"head_cuts": tuple(layout["head_cuts"]), "window": KvWindow(**layout["window"])}
        return cls(**{**value, "layout": KvLayout(**layout), "layer_windows": tuple(value["layer_windows"])})


class PartModel:
    """The weights and the pool of one rank, before the group has formed."""

    def __init__(self, source: ModelSource, settings: PartSettings, memory: PoolMemory | None) -> None:
        """Load them. `memory`: where the pool lies, on a CPU, and None on a GPU.

        Raises ModelLoadError.
        """
        self._settings = settings
        self.device = torch.device(settings.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        config = replace(
            source.config,
            layer_windows=settings.layer_windows,
            attention_sinks=settings.attention_sinks,
            max_position_embeddings=settings.max_position_embeddings,
        )
        source = source.with_config(config)
        parts = partition(config, settings.size)
        self.part: Part = parts[settings.rank]
        own = PartSource(source, self.part)
        self._config: ModelConfig = own.config
        self._weights: LlamaWeights = load_weights(own, TORCH_DTYPES[settings.dtype], self.device)
        self.pool = BlockPool(part_layout(settings.layout, self.part), settings.num_blocks, self.device, memory)
        self.staging = CudaStaging(self.device) if self.device.type == "cuda" else None
        self._vocabulary = Vocabulary(
            size=source.config.vocab_size,
            span=self.part.vocab,
            longest=max(end - begin for begin, end in (part.vocab for part in parts)),
        )

    def store(self) -> KvBlockStore:
        """The pool of this rank as bytes."""
        if self.staging is not None:
            return StagedBlockStore(self.pool, self.staging)
        return HostBlockStore(self.pool.layout, self.pool.words.numpy())

    def join(self, collectives: Collectives) -> RankModel:
        """Ready to compute as one of a group."""
        ranks = VocabRanks(collectives, self.part.vocab[0])
        model = Llama(self._config, self._weights, self._settings.num_positions, ranks)
        config = self._config
        heads_per_kv_head = config.num_heads // config.num_kv_heads
        attention = choose_attention(self._settings.attention, self.pool.kv.device, heads_per_kv_head)
        return RankModel(model, self.pool, attention, self._vocabulary, collectives)


def part_layout(layout: KvLayout, part: Part) -> KvLayout:
    """What of the blocks of all ranks one rank holds."""
    begin, end = part.kv_heads
    return replace(layout, num_kv_heads=end - begin, head_cuts=())
