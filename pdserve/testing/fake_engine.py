"""An engine without a model, whose tokens depend on every byte of KV it finds, and which stops and fails on demand.

The "model": the KV of a token is a vector made from the token and its position; the next token is a hash of the KV of
all positions, read back from the blocks. So any wrong, missing, misplaced or foreign KV changes the output, and
`expected` tells from the token ids alone what the output must be.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.config import Config
from pdserve.engine.batch import Batch
from pdserve.engine.engine import LayerWatch
from pdserve.engine.output import StepOutput
from pdserve.kv_layout import KvLayout
from pdserve.model.config import ModelConfig
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.testing.waiting import eventually
from pdserve.worker.model import LoadedModel

VOCAB_SIZE = 251
_PRIME = 1_000_003
_NUM_LAYERS, _NUM_KV_HEADS, _HEAD_DIM = 3, 2, 4
_SHAPE = (_NUM_LAYERS, 2, _NUM_KV_HEADS, _HEAD_DIM)
_WEIGHTS = (np.arange(np.prod(_SHAPE), dtype=np.int64) * 7919 % 9973 + 1).reshape(_SHAPE)


def expected(
    prompt: Sequence[int], num_tokens: int, *, num_forbidden: int = 0, forbidden: Sequence[int] = ()
) -> list[int]:
    """The first `num_tokens` output tokens after `prompt`; `forbidden` ids are not among the first `num_forbidden`."""
    tokens = list(prompt)
    digest = sum(_digest(_kv(np.array([t]), np.array([p])), np.array([p])) for p, t in enumerate(tokens))
    for index in range(num_tokens):
        token = _token(digest, forbidden if index < num_forbidden else ())
        position = len(tokens)
        digest += _digest(_kv(np.array([token]), np.array([position])), np.array([position]))
        tokens.append(token)
    return tokens[len(prompt) :]


def _kv(token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """[n, layers, 2, heads, head_dim]; small whole numbers, exact in float32."""
    place = np.arange(np.prod(_SHAPE), dtype=np.int64).reshape(_SHAPE)
    mixed = token_ids[:, None, None, None, None] * 31 + positions[:, None, None, None, None] * 17 + place[None] * 13
    return (mixed % 8191 + 1).astype(np.float32)


def _digest(kv: npt.NDArray[np.float32], positions: npt.NDArray[np.int64]) -> int:
    """Of the KV of some positions; adds up over disjoint sets of positions."""
    per_token = (kv.astype(np.int64) * _WEIGHTS[None]).sum(axis=(1, 2, 3, 4))
    return int((per_token * (positions * 2 + 1)).sum())


def _token(digest: int, forbidden: Sequence[int]) -> int:
    token = digest % _PRIME % VOCAB_SIZE
    while token in forbidden:
        token = (token + 1) % VOCAB_SIZE
    return token


class FakeEngine:
    """Implements `Engine`. `pause`, `resume` and `fail_next` may be called from the event loop."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 16, max_position_embeddings: int = 4096) -> None:
        self._layout = KvLayout(
            dtype="float32",
            block_size=block_size,
            num_layers=_NUM_LAYERS,
            num_kv_heads=_NUM_KV_HEADS,
            head_dim=_HEAD_DIM,
        )
        self._num_blocks = num_blocks
        self._store = NumpyBlockStore(self._layout, num_blocks)
        # The same memory: [num_blocks, layers, K/V, heads, block_size, head_dim].
        self._kv = self._store.data.view(np.float32).reshape(num_blocks, _NUM_LAYERS, 2, _NUM_KV_HEADS, block_size, -1)
        self._config = ModelConfig(
            architecture="llama",
            vocab_size=VOCAB_SIZE,
            hidden_size=_NUM_KV_HEADS * _HEAD_DIM,
            intermediate_size=8,
            num_layers=_NUM_LAYERS,
            num_heads=_NUM_KV_HEADS,
            num_kv_heads=_NUM_KV_HEADS,
            head_dim=_HEAD_DIM,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_ids=(),
        )
        self._may_run = threading.Event()
        self._may_run.set()
        self._pause_after = 0
        self._stopped = False
        self._failures: list[Exception] = []
        self.query_lens: list[list[int]] = []
        """Query tokens of each sequence of each step that was computed."""
        self.watched: list[tuple[int, ...]] = []
        """The layers of each step that somebody asked about."""

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
    def store(self) -> NumpyBlockStore:
        """The KV pool as bytes."""
        return self._store

    def pause(self, after_layers: int = 0) -> None:
        """Let the next step wait at its beginning, or when so many layers of it are computed and reported."""
        self._pause_after = after_layers
        if self._may_run.is_set():
            # Another one: a step that still waits for the last one goes on.
            self._may_run = threading.Event()

    def resume(self) -> None:
        """Let it go on."""
        # Here, not only by the thread that waits, which may get to it after the next `pause`.
        self._stopped = False
        self._may_run.set()

    async def paused(self) -> None:
        """Wait until a step waits."""
        await eventually(lambda: self._stopped, "a step waits at the pause point")

    def _pause_point(self, num_layers: int) -> None:
        may_run = self._may_run
        if num_layers == self._pause_after and not may_run.is_set():
            self._stopped = True
            may_run.wait()
            self._stopped = False

    def fail_next(self, *errors: Exception) -> None:
        """Raise these, one per step, instead of computing."""
        self._failures.extend(errors)

    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> StepOutput:
        """See `Engine.forward`. Knows no probabilities."""
        assert len(batch.sampling.logprob_rows) == 0 and len(batch.scoring) == 0, "the fake has no log-probabilities"
        return StepOutput(token_ids=self._step(batch, watch))

    def _step(self, batch: Batch, watch: LayerWatch | None = None) -> npt.NDArray[np.int64]:
        self._pause_point(0)
        self.watched.append(() if watch is None else watch.layers)
        block, offset = np.divmod(batch.slot_mapping, self._layout.block_size)
        kv = _kv(batch.token_ids.astype(np.int64), batch.positions.astype(np.int64))
        for layer in range(_NUM_LAYERS):
            self._kv[block, layer, :, :, offset, :] = kv[:, layer]
            if watch is not None and layer + 1 in watch.layers:
                watch.on_done(layer + 1)
            self._pause_point(layer + 1)
            # A step may fail in the middle: nobody may have relied on what it has written.
            if self._failures:
                raise self._failures.pop(0)
        self.query_lens.append(np.diff(batch.cu_seqlens).tolist())
        sequences = np.searchsorted(batch.cu_seqlens[1:], batch.logit_rows, side="right")
        return np.array([self._draw(batch, row, int(seq)) for row, seq in enumerate(sequences)], dtype=np.int64)

    def forward_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """One-hot rows of what `forward` draws."""
        return np.eye(VOCAB_SIZE, dtype=np.float32)[self._step(batch)]

    def _draw(self, batch: Batch, row: int, sequence: int) -> int:
        # Tokens behind the one that it is drawn after may be a draft: they do not count.
        positions = np.arange(batch.positions[batch.logit_rows[row]] + 1, dtype=np.int64)
        block, offset = np.divmod(positions, self._layout.block_size)
        found = self._kv[batch.block_tables[sequence][block], :, :, :, offset, :]
        forbidden = batch.sampling.forbidden_ids[batch.sampling.forbidden_rows == row]
        return _token(_digest(found, positions), forbidden.tolist())


class FakeEngines:
    """An `EngineFactory` that keeps what it made."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        fingerprint: str = "fake",
        max_position_embeddings: int = 4096,
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._max_position_embeddings = max_position_embeddings
        self.made: list[FakeEngine] = []

    def __call__(self, config: Config) -> LoadedModel:
        engine = FakeEngine(
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            max_position_embeddings=self._max_position_embeddings,
        )
        self.made.append(engine)
        return LoadedModel(engine=engine, name="fake", fingerprint=self._fingerprint)

    @property
    def engine(self) -> FakeEngine:
        """The newest one."""
        return self.made[-1]
