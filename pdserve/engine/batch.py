"""The packed batch of one forward pass, and how scheduled chunks become one.

A prefill chunk is a sequence with many query tokens, a decode step one with a single query token. All of them lie
back to back in one ragged batch, so every kind of step is the same code with other numbers. Everything here is numpy:
an engine moves it to its device. Building a batch touches no token in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pdserve.engine.logit_edits import LogitEdits, RowEdits, SequenceEdits
from pdserve.types import GenerationJob, SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""At and below this a row is greedy: dividing by less only lets noise decide between logits that rounding separates."""

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

TokenMask = npt.NDArray[np.uint32]
"""[ceil(V / 32)] bit i % 32 of word i // 32 is set if token i may be drawn; at least one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """How to draw the token that follows a chunk."""

    params: SamplingParams
    forbidden_token_ids: tuple[int, ...] = ()
    """Ids that must not be drawn, whatever the bias says."""
    edits: RowEdits | None = None
    """Bias and penalties of this very token; None if there are none."""
    num_logprobs: int | None = None
    """Report the log-probability of the token, and of so many of the most likely ones; None: nothing."""
    allowed: Callable[[], TokenMask] | None = None
    """Which tokens may be drawn at all; None: any. Called when the logits are there, on the engine's thread, so that it
    may be worked out while the model computes."""

    @classmethod
    def for_job(
        cls,
        job: GenerationJob,
        output_index: int,
        edits: SequenceEdits | None,
        allowed: Callable[[], TokenMask] | None = None,
    ) -> SampleRequest:
        """The request for output token number `output_index` (from 0) of `job`: no stop id before `min_new_tokens`.

        `edits` is `SequenceEdits.for_job`, and has observed every output token before this one. `allowed` is what the
        job's grammar allows there, which takes account of stop ids itself.
        """
        forbidden = job.stop_token_ids if allowed is None and output_index < job.min_new_tokens else ()
        return cls(
            params=job.sampling,
            forbidden_token_ids=forbidden,
            edits=None if edits is None else edits.row(),
            num_logprobs=job.num_logprobs,
            allowed=allowed,
        )

    @classmethod
    def for_draft(
        cls,
        job: GenerationJob,
        output_index: int,
        draft: Sequence[int],
        edits: SequenceEdits | None,
        allowed: Sequence[Callable[[], TokenMask]] | None = None,
    ) -> tuple[SampleRequest, ...]:
        """As `for_job`, for output token number `output_index`, and for the token after each of those of `draft`.
        `allowed` has one mask for each of all these."""
        rows = (None,) * (1 + len(draft)) if edits is None else (edits.row(), *edits.ahead(draft))
        masks = (None,) * (1 + len(draft)) if allowed is None else allowed
        requests = []
        for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            request = cls.for_job(job, output_index + i, None, mask)
            requests.append(request if row is None else replace(request, edits=row))
        return tuple(requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What to report of the given tokens that follow those of a chunk."""

    target_ids: Sequence[int] | IntArray
    """Query token i of the chunk is followed by `target_ids[i]`; may end before the chunk does."""
    num_top: int
    """How many of the most likely tokens to report with each."""

    @classmethod
    def for_prompt(cls, job: GenerationJob, start: int, length: int) -> ScoreRequest | None:
        """For the chunk of `length` tokens of `job` from `start` on; None if nothing of it is to be reported."""
        if job.num_prompt_logprobs is None:
            return None
        targets = job.token_ids[start + 1 : min(start + length + 1, job.num_prompt_tokens)]
        return cls(target_ids=targets, num_top=job.num_prompt_logprobs) if targets else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceChunk:
    """The tokens of one sequence that one forward pass computes."""

    token_ids: Sequence[int] | IntArray
    """The new tokens; at least one."""
    start_position: int
    """Position of the first of them; the K/V of all earlier positions is already in the blocks."""
    block_table: Sequence[int] | IntArray
    """Blocks of the sequence in order of position; they must reach to the end of the chunk."""
    samples: tuple[SampleRequest, ...] = ()
    """How to draw the next token, once for each output that goes on from here; empty while more of the prompt is to
    come."""
    score: ScoreRequest | None = None
    """What to report of the prompt; None if nothing was asked for."""
    num_drafted: int = 0
    """If not 0, so many of the last tokens are a draft: `samples` say how to draw the token before the first of them,
    and then those after each of them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SamplingBatch:
    """Sampling parameters as columns: entry i belongs to entry i of `Batch.logit_rows`, R entries in all."""

    temperature: FloatArray
    """[R]; 0 is greedy, and so is everything up to `GREEDY_TEMPERATURE`."""
    top_k: IntArray
    """[R]; 0 keeps all."""
    top_p: FloatArray
    """[R]"""
    min_p: FloatArray
    """[R]"""
    seed: npt.NDArray[np.uint64]
    """[R]"""
    positions: LongArray
    """[R] position in its sequence of the token to draw."""
    forbidden_rows: LongArray
    """[F] entries (in 0..R-1) of `forbidden_ids`: pairs, as rows rarely forbid anything."""
    forbidden_ids: LongArray
    """[F] token ids that must not be drawn for the entry."""
    edits: LogitEdits
    """Bias and penalties; they come before what is forbidden."""
    num_logprobs: IntArray
    """[R] how many of the most likely tokens to report beside the drawn one; -1 reports nothing."""
    masked_rows: LongArray
    """[M] entries, ascending, that may draw some tokens only; see `masks`."""
    allowed: tuple[Callable[[], TokenMask], ...]
    """[M] which they are."""

    def __len__(self) -> int:
        return len(self.temperature)

    @cached_property
    def is_greedy(self) -> npt.NDArray[np.bool_]:
        """[R] whether the most likely token is taken."""
        return self.temperature <= np.float32(GREEDY_TEMPERATURE)

    @cached_property
    def all_greedy(self) -> bool:
        """Whether that is so of all rows."""
        return bool(self.is_greedy.all())

    @cached_property
    def wide(self) -> tuple[FloatArray, LongArray, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """As the kernels of the CPU engine take them, [R] each: 1 / temperature, 0 where the most likely token is
        taken; top-k; top-p; logarithm of min-p."""
        greedy = self.is_greedy
        inverse = np.where(greedy, np.float32(0), np.float32(1) / np.where(greedy, 1, self.temperature))
        with np.errstate(divide="ignore"):
            log_min_p = np.log(self.min_p.astype(np.float64))
        return inverse.astype(np.float32), self.top_k.astype(np.int64), self.top_p.astype(np.float64), log_min_p

    @cached_property
    def logprob_rows(self) -> LongArray:
        """[N] entries, ascending, whose log-probabilities are to be reported."""
        return np.flatnonzero(self.num_logprobs >= 0)

    def masks(self) -> npt.NDArray[np.uint32]:
        """[M, ceil(V / 32)] the tokens that entries of `masked_rows` may draw. M is not 0. Waits until they are known;
        to be called as late as possible, after bias and penalties and together with what is forbidden."""
        return np.stack([mask() for mask in self.allowed])


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoringBatch:
    """Given tokens whose log-probabilities are to be reported, S in all."""

    rows: LongArray
    """[S] query tokens, ascending, that they follow."""
    target_ids: LongArray
    """[S] the tokens."""
    num_top: IntArray
    """[S] how many of the most likely tokens to report with each."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """One ragged forward pass over `num_seqs` sequences with `num_tokens` query tokens in all."""

    token_ids: IntArray
    """[num_tokens], sequences back to back."""
    positions: IntArray
    """[num_tokens] position of each token in its sequence."""
    cu_seqlens: IntArray
    """[num_seqs + 1]; query tokens of sequence i are cu_seqlens[i]:cu_seqlens[i + 1]."""
    slot_mapping: LongArray
    """[num_tokens] where the K/V of each token goes: block * block_size + offset in the block."""
    block_tables: IntArray
    """[num_seqs, max_blocks]; entries past a sequence's own blocks are 0 and mean nothing."""
    context_lens: IntArray
    """[num_seqs] tokens of each sequence, this chunk included."""
    logit_rows: IntArray
    """[R] query tokens, ascending, that are followed by a token to draw; as often as one is drawn after it."""
    sampling: SamplingBatch
    scoring: ScoringBatch

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return len(self.token_ids)

    @property
    def output_rows(self) -> IntArray:
        """[R + S] query tokens whose logits are needed: `logit_rows`, then those of `scoring`."""
        return np.concatenate([self.logit_rows, self.scoring.rows.astype(np.int32)])

    @property
    def num_seqs(self) -> int:
        """Sequences."""
        return len(self.context_lens)


def build_batch(chunks: Sequence[SequenceChunk], block_size: int) -> Batch:
    """Pack `chunks` in the order given; results come in the order of their `samples`.

    An empty chunk, or a block table that is too short, is a bug of the scheduler and fails an assertion.
    """
    tokens = [np.asarray(chunk.token_ids, dtype=np.int32) for chunk in chunks]
    tables = [np.asarray(chunk.block_table, dtype=np.int32) for chunk in chunks]
    query_lens = np.array([len(t) for t in tokens], dtype=np.int64)
    assert len(chunks) > 0 and query_lens.min() > 0, "a batch needs at least one token of each sequence"
    starts = np.array([chunk.start_position for chunk in chunks], dtype=np.int64)
    context_lens = starts + query_lens
    table_lens = np.array([len(t) for t in tables], dtype=np.int64)
    assert starts.min() >= 0 and bool(np.all(table_lens * block_size >= context_lens)), "a block table is too short"

    cu_seqlens = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=cu_seqlens[1:])
    block_tables = np.zeros((len(chunks), int(table_lens.max())), dtype=np.int32)
    # The mask enumerates cells row by row, which is the order of the concatenation.
    block_tables[np.arange(block_tables.shape[1]) < table_lens[:, None]] = np.concatenate(tables)

    sequence = np.repeat(np.arange(len(chunks)), query_lens)
    positions = np.arange(len(sequence)) - cu_seqlens[sequence] + starts[sequence]
    block, offset = np.divmod(positions, block_size)
    slots = block_tables[sequence, block].astype(np.int64) * block_size + offset

    num_samples = np.array([len(chunk.samples) for chunk in chunks], dtype=np.int64)
    sampled = np.repeat(np.arange(len(chunks)), num_samples)
    num_drafted = np.array([chunk.num_drafted for chunk in chunks], dtype=np.int64)
    assert bool(np.all((num_drafted == 0) | (num_samples == num_drafted + 1))), "a draft is drawn after every token"
    # Query tokens behind the one that a token is drawn after: none, or the rest of the draft.
    nth = np.arange(len(sampled)) - (np.cumsum(num_samples) - num_samples)[sampled]
    behind = np.where(num_drafted[sampled] > 0, num_drafted[sampled] - nth, 0)
    return Batch(
        token_ids=np.concatenate(tokens),
        positions=positions.astype(np.int32),
        cu_seqlens=cu_seqlens,
        slot_mapping=slots,
        block_tables=block_tables,
        context_lens=context_lens.astype(np.int32),
        logit_rows=(cu_seqlens[sampled + 1] - 1 - behind).astype(np.int32),
        sampling=_sampling_batch(
            [sample for chunk in chunks for sample in chunk.samples], context_lens[sampled] - behind
        ),
        scoring=_scoring_batch([(int(cu_seqlens[i]), c.score) for i, c in enumerate(chunks) if c.score is not None]),
    )


def _sampling_batch(requests: Sequence[SampleRequest], positions: LongArray) -> SamplingBatch:
    params = [request.params for request in requests]
    forbidden_counts = np.array([len(request.forbidden_token_ids) for request in requests], dtype=np.int64)
    return SamplingBatch(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_k=np.array([p.top_k for p in params], dtype=np.int32),
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        min_p=np.array([p.min_p for p in params], dtype=np.float32),
        seed=np.array([p.seed for p in params], dtype=np.uint64),
        positions=positions,
        forbidden_rows=np.repeat(np.arange(len(requests)), forbidden_counts),
        forbidden_ids=np.array([i for request in requests for i in request.forbidden_token_ids], dtype=np.int64),
        edits=LogitEdits.pack([request.edits for request in requests]),
        num_logprobs=np.array([-1 if r.num_logprobs is None else r.num_logprobs for r in requests], dtype=np.int32),
        masked_rows=np.array([i for i, r in enumerate(requests) if r.allowed is not None], dtype=np.int64),
        allowed=tuple(r.allowed for r in requests if r.allowed is not None),
    )


def _scoring_batch(requests: Sequence[tuple[int, ScoreRequest]]) -> ScoringBatch:
    """`requests` are pairs of a chunk's first query token and what to report of it."""
    if not requests:
        return _NO_SCORING
    lengths = [len(score.target_ids) for _, score in requests]
    return ScoringBatch(
        rows=np.concatenate([np.arange(first, first + n) for (first, _), n in zip(requests, lengths, strict=True)]),
        target_ids=np.concatenate([np.asarray(score.target_ids, dtype=np.int64) for _, score in requests]),
        num_top=np.repeat(np.array([score.num_top for _, score in requests], dtype=np.int32), lengths),
    )


_NO_SCORING = ScoringBatch(rows=np.empty(0, np.int64), target_ids=np.empty(0, np.int64), num_top=np.empty(0, np.int32))
