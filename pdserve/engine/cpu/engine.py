"""The CPU engine: one compiled function per step over packed weights and a block pool in float16 or eight bits.

A request's logits and KV bytes do not depend on batch, chunking, threads or processor model: see `gemm.py` and
`attention.py` for why. Threads share the work of a step and meet at barriers inside the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from pdserve.core_ledger import CoreLedger
from pdserve.engine.batch import Batch, SamplingBatch
from pdserve.engine.cpu import draw as draw_kernels
from pdserve.engine.cpu import step as step_kernels
from pdserve.engine.cpu.embeddings import Embeddings
from pdserve.engine.cpu.entry import WRONG, prepare
from pdserve.engine.cpu.shape import ModelShape
from pdserve.engine.cpu.team import Team
from pdserve.engine.cpu.weights import PackedModel, WeightFormat
from pdserve.engine.cpu.workspace import Workspace
from pdserve.engine.engine import LayerWatch
from pdserve.engine.host_store import HostBlockStore
from pdserve.engine.noise import row_keys
from pdserve.engine.output import Logprobs, StepOutput
from pdserve.engine.shared_pool import allocate_pool
from pdserve.kv_layout import KvBlockStore, KvLayout, spread_factors
from pdserve.model.config import ModelConfig
from pdserve.model.rope import rope_tables

SCORED_ROWS = 64
"""Rows of logits at a time for log-probabilities of a prompt."""

SHARED_ROWS = 4
"""Rows of logits from which on threads share the drawing: fewer take less time than waking a thread."""


KvDtype = Literal["float16", "int8"]
KV_DTYPES: Final[tuple[KvDtype, ...]] = get_args(KvDtype)
"""In what this engine keeps KV."""


def kv_layout(
    config: ModelConfig, block_size: int, weights: WeightFormat = "auto", kv_dtype: KvDtype = "float16"
) -> KvLayout:
    """Geometry of this engine's KV blocks.

    The format of the weights is part of it: KV computed on others is not what this engine would have computed.
    """
    return KvLayout(
        dtype=kv_dtype,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        k_order="dim/4,token,4" if kv_dtype == "int8" else "dim,token",
        v_order="token,dim",
        numerics=f"cpu weights:{weights}",
        window=config.kv_window,
    )


class CpuEngine:
    """Implements `Engine`."""

    def __init__(
        self,
        config: ModelConfig,
        model: PackedModel,
        layout: KvLayout,
        *,
        num_blocks: int,
        threads: int,
        cpus: Sequence[int] | None = None,
        cores: CoreLedger | None = None,
        team: Team | None = None,
    ) -> None:
        """`cpus`: one for each of the first threads to be pinned to; the calling thread, which has to call `forward` as
        well, is the first. `cores` says before each step how many of the threads take part; all of them without. `team`
        is that of another engine that the same thread calls, with as many threads."""
        block_size = layout.block_size
        self._config = config
        self._layout = layout
        self._num_blocks = num_blocks
        self._model = model
        self._shape = ModelShape(config, block_size, coded_kv=layout.has_scales)
        self._shape_vector = self._shape.vector
        self._windows = self._shape.windows
        self._team = team or Team(threads, cpus)
        self._cores = cores
        self._work = Workspace(self._shape, threads)
        self._ids = np.empty((threads, config.vocab_size), np.int64)
        self._num_positions = layout.longest_sequence(config.max_position_embeddings, num_blocks)
        tables = rope_tables(config, self._num_positions)
        self._cos, self._sin = tables.cos.reshape(-1), tables.sin.reshape(-1)
        self._eps = np.float32(config.rms_norm_eps)
        # Zeros: attention multiplies slots that were never written by a weight of exactly 0. The kernels tell the two
        # kinds of pool apart by the type of the array.
        element = np.uint8 if layout.has_scales else np.uint16
        self._kv = allocate_pool(num_blocks * layout.block_nbytes).data.view(element)
        self._spreads = np.array(spread_factors(config.head_dim), np.float32)
        self._embeddings = Embeddings(model.embedding)
        self._num_slots = num_blocks * block_size
        self._group = self._shape.group
        words = self._kv.view(np.int32).reshape(num_blocks, config.num_layers, -1)
        self._store = HostBlockStore(self._layout, words)

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self._config

    @property
    def layout(self) -> KvLayout:
        """Geometry of the KV blocks."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool."""
        return self._num_blocks

    @property
    def team(self) -> Team:
        """The threads that compute."""
        return self._team

    @property
    def store(self) -> KvBlockStore:
        """The KV pool as bytes."""
        return self._store

    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> StepOutput:
        """See `Engine.forward`."""
        self._borrow_cores()
        try:
            return self._forward(batch, watch)
        finally:
            self._return_cores()

    def _borrow_cores(self) -> None:
        """Have as many threads work as there are cores for now."""
        if self._cores is not None:
            self._team.working = min(self._cores.step_begins(), self._team.size)

    def _return_cores(self) -> None:
        if self._cores is not None:
            self._cores.step_ended()

    def _forward(self, batch: Batch, watch: LayerWatch | None) -> StepOutput:
        logits = self._compute(batch, watch)
        rows = batch.sampling.logprob_rows
        # A copy of their rows, as sampling edits the logits.
        raw = logits[rows] if len(rows) else None
        token_ids = self._sample(logits, batch.sampling)
        logprobs = None
        if raw is not None:
            logprobs = Logprobs.of(raw, token_ids[rows], int(batch.sampling.num_logprobs.max()))
        return StepOutput(token_ids=token_ids, logprobs=logprobs, prompt_logprobs=self._score(batch))

    def forward_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """See `Engine.forward_logits`."""
        self._borrow_cores()
        try:
            return self._compute(batch).copy()
        finally:
            self._return_cores()

    def _compute(self, batch: Batch, watch: LayerWatch | None = None) -> npt.NDArray[np.float32]:
        """Run the layers; a view of the logits [R, V], valid until the next step."""
        work, num_tokens, num_rows = self._work, batch.num_tokens, len(batch.logit_rows)
        work.reserve(num_tokens, num_rows)
        sequence = work.sequence[:num_tokens]
        # The kernels check nothing.
        num_items = prepare(
            batch.token_ids, batch.positions, batch.slot_mapping, batch.cu_seqlens, self._config.vocab_size,
            self._num_positions, self._num_slots, self._group, sequence, work.items,
        )  # fmt: skip
        assert num_items >= 0, WRONG[num_items]
        self._embeddings.fetch(batch.token_ids, work.x, self._shape.hidden_padded)
        model, num_layers = self._model, self._config.num_layers
        begin = 0
        for end in (*(() if watch is None else watch.layers), None):
            # The rest with the LM head, after what is watched; starting the kernel once more takes about 10 us.
            self._team.run(
                step_kernels.step, np.zeros(1 + num_layers, np.int64), begin, num_layers if end is None else end,
                self._shape_vector, model.arena, model.matrices, model.floats, model.norms, self._cos, self._sin,
                batch.positions, self._windows, sequence, batch.slot_mapping, batch.block_tables,
                work.items[:num_items], batch.logit_rows if end is None else batch.logit_rows[:0], self._eps, self._kv,
                self._spreads, work.x, work.xn, work.xq, work.xs, work.xpair, work.inner, work.inner_q, work.inner_s,
                work.inner_pair, work.y, work.sink_q, work.scratch, work.logits_flat,
            )  # fmt: skip
            if watch is not None and end is not None:
                watch.on_done(end)
                begin = end
        return work.logits(num_rows)

    def _score(self, batch: Batch) -> Logprobs | None:
        """Log-probabilities of given tokens, from the hidden rows that `_compute` has left."""
        scoring = batch.scoring
        if len(scoring) == 0:
            return None
        work, model = self._work, self._model
        num_top = int(scoring.num_top.max())
        parts = []
        for begin in range(0, len(scoring), SCORED_ROWS):
            rows = scoring.rows[begin : begin + SCORED_ROWS]
            work.reserve(batch.num_tokens, len(rows))
            self._team.run(
                step_kernels.head, np.zeros(1, np.int64), self._shape_vector, model.arena, model.matrices, model.floats,
                model.norms, rows.astype(np.int32), self._eps, work.x, work.xn, work.xq, work.xs, work.xpair,
                work.logits_flat,
            )  # fmt: skip
            targets = scoring.target_ids[begin : begin + SCORED_ROWS]
            parts.append(Logprobs.of(work.logits(len(rows)), targets, num_top))
        return Logprobs.concatenate(parts)

    def _sample(self, logits: npt.NDArray[np.float32], sampling: SamplingBatch) -> npt.NDArray[np.int64]:
        """Draw a token for each row, after editing `logits` in place."""
        tokens = np.empty(len(sampling), np.int64)
        if len(sampling) == 0:
            return tokens
        sampling.edits.apply(logits)
        if len(sampling.forbidden_ids):
            logits[sampling.forbidden_rows, sampling.forbidden_ids] = -np.inf
        run = self._team.run if len(tokens) >= SHARED_ROWS else self._team.run_alone
        if len(sampling.masked_rows):
            run(
                draw_kernels.mask, np.zeros(1, np.int64), self._work.logits_flat, self._shape.vocab_padded,
                self._config.vocab_size, sampling.masked_rows, sampling.masks(),
            )  # fmt: skip
        if sampling.all_greedy:
            run(
                draw_kernels.greedy, np.zeros(1, np.int64), self._work.logits_flat, self._shape.vocab_padded,
                self._config.vocab_size, tokens,
            )  # fmt: skip
            return tokens
        run(
            draw_kernels.draw, np.zeros(1, np.int64), self._work.logits_flat, self._shape.vocab_padded,
            self._config.vocab_size, *sampling.wide, row_keys(sampling.seed, sampling.positions).astype(np.int64),
            self._ids, tokens,
        )  # fmt: skip
        return tokens
