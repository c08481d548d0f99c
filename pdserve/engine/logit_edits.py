"""What is done to a model's logits before a token is drawn: bias and penalties, sparse, and up to date token by token.

To the logit x of a token, in this order (that of vLLM, llama.cpp and transformers):

    x += bias                                                      logit_bias
    x = x / repetition if x > 0 else x * repetition                if the token is in the prompt or in the output
    x -= frequency * count + (presence if count > 0 else 0)        count: how often it is in the output

The prompt never counts for presence and frequency: "output" begins at `GenerationJob.num_prompt_tokens`, also where a
retried job brings output tokens of earlier attempts along. The repetition penalty is that of Keskar et al., "CTRL"
(2019), in the form that transformers gave it; presence and frequency penalties are those of the OpenAI API.

Only tokens that something is done to are listed, so a step moves some hundred numbers and nothing as wide as the
vocabulary. Everything here is numpy and shared by all engines.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.types import GenerationJob, SamplingParams

BIAS, REPETITION, SUBTRACT = 0, 1, 2
"""Rows of `terms`."""

LARGEST_LOGIT = 1e38
"""A logit that a tiny repetition penalty would make infinite stays here: infinite ones have no differences."""


@dataclass(frozen=True, eq=False, slots=True)
class RowEdits:
    """Edits of one row of logits. Views of a `SequenceEdits`, valid until its next `observe`."""

    ids: npt.NDArray[np.int64]
    """[E] token ids, each once."""
    terms: npt.NDArray[np.float32]
    """[3, E]: bias (0 is none), repetition penalty (1 is none), what to subtract (0 is nothing)."""


@dataclass(frozen=True, eq=False, slots=True)
class LogitEdits:
    """Edits of all rows of a step."""

    rows: npt.NDArray[np.int64]
    """[E] row of each entry; no (row, id) comes twice."""
    ids: npt.NDArray[np.int64]
    """[E] token id of each entry."""
    terms: npt.NDArray[np.float32]
    """[3, E]; see `RowEdits`."""

    @classmethod
    def pack(cls, rows: Sequence[RowEdits | None]) -> LogitEdits:
        """Entry i of `rows` belongs to row i; None is a row that stays as it is."""
        found = [(row, edits) for row, edits in enumerate(rows) if edits is not None]
        if not found:
            return _NO_EDITS
        return cls(
            rows=np.repeat([row for row, _ in found], [len(edits.ids) for _, edits in found]),
            ids=np.concatenate([edits.ids for _, edits in found]),
            terms=np.concatenate([edits.terms for _, edits in found], axis=1),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Edit `logits` [R, V] in place."""
        if len(self) == 0:
            return
        x = logits[self.rows, self.ids] + self.terms[BIAS]
        repetition = self.terms[REPETITION]
        with np.errstate(over="ignore"):
            x = np.where(x > 0, x / repetition, x * repetition).clip(-LARGEST_LOGIT, LARGEST_LOGIT)
        logits[self.rows, self.ids] = x - self.terms[SUBTRACT]


_NO_EDITS = LogitEdits(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((3, 0), np.float32))


class SequenceEdits:
    """The edits of one sequence: made from its token ids alone, so the same on every worker; then O(1) a token."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._params = params
        self._ids = np.empty(0, dtype=np.int64)
        self._terms = np.empty((3, 0), dtype=np.float32)
        self._entry: dict[int, int] = {}
        """Token id -> its column in the arrays, of which the first `len(self._entry)` are in use."""
        self._counts: dict[int, int] = {}
        """How often each token is in the output."""
        self._num_output = 0
        bias = dict(params.logit_bias)
        self._add(list(bias))
        self._terms[BIAS, : len(bias)] = list(bias.values())
        if params.repetition_penalty != 1.0:
            # Without sorting: a prompt may have 32k tokens.
            seen = np.flatnonzero(np.bincount(np.asarray(prompt_ids, np.int64)))
            is_biased = np.isin(seen, np.fromiter(bias, np.int64, len(bias)))
            self._add(seen[~is_biased].tolist())
            self._terms[REPETITION, len(bias) : len(self._entry)] = params.repetition_penalty
            self._terms[REPETITION, [self._entry[i] for i in seen[is_biased].tolist()]] = params.repetition_penalty
        for index, token_id in enumerate(output_ids):
            self.observe(index, token_id)

    @classmethod
    def for_job(cls, job: GenerationJob) -> SequenceEdits | None:
        """With the output tokens that `job` brings along; None if its parameters leave the logits as they are."""
        if not job.sampling.edits_logits:
            return None
        return cls(job.sampling, job.token_ids[: job.num_prompt_tokens], job.token_ids[job.num_prompt_tokens :])

    def observe(self, index: int, token_id: int) -> None:
        """Output token number `index` (from 0) is `token_id`. One that was observed before counts once."""
        if index < self._num_output:
            return
        assert index == self._num_output, f"output token {index} comes after {self._num_output} of them"
        self._num_output += 1
        if not self._params.penalizes:
            return
        params = self._params
        if token_id not in self._entry:
            self._add([token_id])
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        entry = self._entry[token_id]
        self._terms[REPETITION, entry] = params.repetition_penalty
        self._terms[SUBTRACT, entry] = params.frequency_penalty * count + params.presence_penalty

    def row(self) -> RowEdits:
        """For the next token."""
        used = len(self._entry)
        return RowEdits(self._ids[:used], self._terms[:, :used])

    def ahead(self, token_ids: Sequence[int]) -> list[RowEdits]:
        """The edits after each of `token_ids`, if those are the next output tokens. Nothing is observed."""
        if not self._params.penalizes or not token_ids:
            return [self.row()] * len(token_ids)
        twin = copy.copy(self)
        twin._ids, twin._terms = self._ids.copy(), self._terms.copy()
        twin._entry, twin._counts = dict(self._entry), dict(self._counts)
        rows = []
        for index, token_id in enumerate(token_ids, start=self._num_output):
            twin.observe(index, token_id)
            row = twin.row()
            rows.append(RowEdits(row.ids.copy(), row.terms.copy()))
        return rows

    def _add(self, token_ids: Sequence[int]) -> None:
        """Entries without effect for tokens that have none."""
        used = len(self._entry)
        end = used + len(token_ids)
        if end > len(self._ids):
            capacity = max(2 * end, 16)
            ids, terms = np.empty(capacity, np.int64), np.empty((3, capacity), np.float32)
            ids[:used], terms[:, :used] = self._ids[:used], self._terms[:, :used]
            self._ids, self._terms = ids, terms
        self._ids[used:end] = token_ids
        self._terms[:, used:end] = [[0.0], [1.0], [0.0]]
        self._entry.update(zip(token_ids, range(used, end), strict=True))
