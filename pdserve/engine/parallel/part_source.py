"""The weights of one rank, cut out of those of the whole model as they are read."""

from __future__ import annotations

import numpy as np

from pdserve.engine.parallel.partition import Part, Span
from pdserve.model.config import ModelConfig
from pdserve.model.names import EMBEDDING, LM_HEAD
from pdserve.model.source import ModelSource
from pdserve.model.tensors import Float32Array

_ROWS, _COLUMNS = 0, 1


class PartSource:
    """Implements `pdserve.engine.weights.TensorSource`: one rank's tensors under the names of the whole ones.

    Each tensor is read whole and cut afterwards, so that every format is cut alike; one at a time is held.
    """

    def __init__(self, source: ModelSource, part: Part) -> None:
        self.config: ModelConfig = part.config(source.config)
        self._source = source
        head_dim = source.config.head_dim
        query = (part.query_heads[0] * head_dim, part.query_heads[1] * head_dim)
        kv = (part.kv_heads[0] * head_dim, part.kv_heads[1] * head_dim)
        self._cuts: dict[str, tuple[int, Span]] = {
            "q_proj": (_ROWS, query),
            "k_proj": (_ROWS, kv),
            "v_proj": (_ROWS, kv),
            "gate_proj": (_ROWS, part.inner),
            "up_proj": (_ROWS, part.inner),
            "o_proj": (_COLUMNS, query),
            "down_proj": (_COLUMNS, part.inner),
        }
        self._vocab = part.vocab

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `tensor(name)`."""
        shape = list(self._source.shape(name))
        if (cut := self._cut(name)) is not None:
            axis, (begin, end) = cut
            shape[axis] = end - begin
        return tuple(shape)

    def tensor(self, name: str) -> Float32Array:
        """This rank's part of one tensor as float32: an array of its own, C-contiguous and writable."""
        whole = self._source.tensor(name)
        if (cut := self._cut(name)) is None:
            return whole
        axis, (begin, end) = cut
        # A copy, as a view would keep the whole tensor in memory.
        return np.array(whole[begin:end] if axis == _ROWS else whole[:, begin:end], order="C")

    def _cut(self, name: str) -> tuple[int, Span] | None:
        if name in (EMBEDDING, LM_HEAD):
            return _ROWS, self._vocab
        *_, module, kind = name.split(".")
        cut = self._cuts.get(module)
        # The bias of a matrix that is cut by columns belongs to the sum.
        return None if cut is None or (kind == "bias" and cut[0] == _COLUMNS) else cut
