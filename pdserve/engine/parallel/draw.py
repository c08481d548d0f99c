"""Drawing tokens where each rank has the logits of some of the vocabulary, without bringing all logits together.

Each rank proposes what could be drawn of its part, and rank 0 decides. What a rank proposes for a row, by how it is
drawn (see `sampler.py`):

- greedy: its greatest logit, with the lowest id that has it;
- without filters: the best of its part by `logit / temperature + noise`, as noise belongs to the token id;
- filtered: its K best candidates, and the mass of its part where top-p counts that of all tokens. The K best of all
  tokens are among them, and masses are integers, so their sum is exactly that of a single rank.

So rank 0 draws what one rank with the same logits would have drawn. Rows that the candidates do not decide, which are
rare, are drawn from their whole logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.batch import SamplingBatch
from pdserve.engine.device import to_host, upload
from pdserve.engine.logit_edits import LogitEdits
from pdserve.engine.parallel.collectives import Collectives
from pdserve.engine.parallel.messages import Array
from pdserve.engine.parallel.partition import VOCAB_UNIT, Span
from pdserve.engine.sampler import NUM_CANDIDATES, Rows, RowWays, best_scored, draw_candidates


def sampling_of_part(sampling: SamplingBatch, vocab: Span, masks: Array) -> SamplingBatch:
    """The batch with only those bans, edits and masks that are about token ids of `vocab`, counted from its begin.

    `masks` [M, words] are those of all tokens, for the masked rows.
    """
    begin, end = vocab
    edited = (sampling.edits.ids >= begin) & (sampling.edits.ids < end)
    forbidden = (sampling.forbidden_ids >= begin) & (sampling.forbidden_ids < end)
    words = masks[:, begin // VOCAB_UNIT : -(-end // VOCAB_UNIT)]
    return replace(
        sampling,
        edits=LogitEdits(
            sampling.edits.rows[edited],
            sampling.edits.ids[edited] - begin,
            np.ascontiguousarray(sampling.edits.terms[:, edited]),
        ),
        forbidden_rows=sampling.forbidden_rows[forbidden],
        forbidden_ids=sampling.forbidden_ids[forbidden] - begin,
        allowed=tuple(_Known(row) for row in words),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A mask that need not be waited for."""

    words: npt.NDArray[np.uint32]

    def __call__(self) -> npt.NDArray[np.uint32]:
        return self.words


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Whose logits are where."""

    size: int
    span: Span
    """Token ids of this rank."""
    longest: int
    """Token ids of the rank that has most."""

    @property
    def num_candidates(self) -> int:
        """How many a single rank would look at first."""
        return min(NUM_CANDIDATES, self.size)

    @property
    def num_proposed(self) -> int:
        """Candidates of each rank; all tokens of a rank that has fewer."""
        return min(self.num_candidates, self.longest)

    @property
    def proposes_all(self) -> bool:
        """Whether no token is left out."""
        return self.longest <= self.num_proposed


def propose(
    logits: torch.Tensor, sampling: SamplingBatch, vocabulary: Vocabulary, collectives: Collectives
) -> list[torch.Tensor]:
    """Send to rank 0 what could be drawn from `logits` [R, V of this rank], already constrained. R is not 0.

    Gives the proposals by rank on rank 0, int64 [columns of `_Columns`] each; nothing elsewhere.
    """
    ways = RowWays.of(sampling, vocabulary.num_candidates)
    first_id = vocabulary.span[0]
    found: list[torch.Tensor] = []
    if ways.greedy.any():
        best = logits[upload(np.flatnonzero(ways.greedy), logits.device)]
        ids = best.argmax(dim=-1)
        found += [_bits(best.gather(1, ids[:, None])[:, 0]), ids + first_id]
    if not ways.greedy.all():
        # Weights are relative to the greatest logit of all tokens.
        greatest = collectives.maximum(logits.amax(dim=-1, keepdim=True))
        if ways.unfiltered.any():
            rows = Rows.select(logits, sampling, ways.unfiltered)
            rows = replace(rows, best=greatest[rows.rows])
            ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)[None]
            score, token = best_scored(rows, rows.scale(rows.logits), ids, None)
            found += [_bits(score), token]
        if ways.narrow.any():
            rows = Rows.select(logits, sampling, ways.narrow)
            rows = replace(rows, best=greatest[rows.rows])
            found.append(_bits(rows.best[:, 0]))
            found += _candidates(rows, first_id, vocabulary.num_proposed)
    if not found:
        # All rows are drawn from whole logits.
        return []
    return collectives.gather(torch.cat([part.flatten() for part in found]))


def _candidates(rows: Rows, first_id: int, count: int) -> list[torch.Tensor]:
    """Logits and ids [N, count] of the best tokens of this rank, and masses [W] where they are needed."""
    values, ids = rows.logits.topk(min(count, rows.logits.shape[1]), dim=-1)
    missing = (0, count - values.shape[1])
    values = torch.nn.functional.pad(values, missing, value=-torch.inf)
    found = [_bits(values), torch.nn.functional.pad(ids + first_id, missing)]
    if len(rows.whole_mass_rows):
        found.append(rows.whole_mass())
    return found


def decide(
    proposals: Sequence[torch.Tensor], sampling: SamplingBatch, vocabulary: Vocabulary
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """On rank 0: the token of each row [R], and which rows [R] have to be drawn from their whole logits after all."""
    ways = RowWays.of(sampling, vocabulary.num_candidates)
    tokens = np.zeros(len(sampling), dtype=np.int64)
    undecided = ways.wide.copy()
    if not proposals:
        return tokens, undecided
    columns = _Columns(torch.stack(list(proposals)))
    parts: list[torch.Tensor] = []
    for way in (ways.greedy, ways.unfiltered):
        if count := int(way.sum()):
            values, ids = _values(columns.take(count)), columns.take(count)
            # The first rank that has the greatest value has the lowest id.
            parts.append(ids.gather(0, values.argmax(dim=0)[None])[0])
    if count := int(ways.narrow.sum()):
        parts += _decide_narrow(columns, sampling, ways.narrow, vocabulary)
    host = to_host(torch.cat(parts))
    ends = np.cumsum([len(part) for part in parts])
    pieces = np.split(host, ends[:-1])
    order = [way for way in (ways.greedy, ways.unfiltered, ways.narrow) if way.any()]
    for way, piece in zip(order, pieces, strict=False):
        tokens[way] = piece
    if count:
        undecided[ways.narrow] = pieces[-1] == 0
    return tokens, undecided


def _decide_narrow(
    columns: _Columns, sampling: SamplingBatch, narrow: npt.NDArray[np.bool_], vocabulary: Vocabulary
) -> list[torch.Tensor]:
    """Tokens [N] of the filtered rows, and whether they are right [N]."""
    count, width = int(narrow.sum()), vocabulary.num_proposed
    greatest = _values(columns.take(count))[0][:, None].float()
    # [ranks, N, K] each, of which the K best of a row are wanted.
    values = _values(columns.take(count * width)).reshape(-1, count, width).float()
    ids = columns.take(count * width).reshape(-1, count, width)
    num_best = vocabulary.size if vocabulary.proposes_all else vocabulary.num_candidates
    best, place = values.movedim(0, 1).flatten(1).topk(num_best, dim=-1)
    ids = ids.movedim(0, 1).flatten(1).gather(1, place)
    # All rows have to be at hand for the parameters of some, so candidates stand for their logits.
    rows = Rows.select(best.new_zeros((len(sampling), 1)), sampling, narrow, vocabulary.size)
    rows = replace(rows, logits=best, best=greatest)
    num_masses = len(rows.whole_mass_rows)
    mass = columns.take(num_masses).sum(dim=0)[:, None] if num_masses else None
    return list(draw_candidates(rows, best, ids, mass, is_all=vocabulary.proposes_all))


class _Columns:
    """Proposals of all ranks, [ranks, columns], taken apart from left to right."""

    def __init__(self, proposals: torch.Tensor) -> None:
        self._proposals = proposals
        self._begin = 0

    def take(self, count: int) -> torch.Tensor:
        """The next `count` columns."""
        begin, self._begin = self._begin, self._begin + count
        return self._proposals[:, begin : self._begin]


def whole_rows(sampling: SamplingBatch, mask: npt.NDArray[np.bool_]) -> SamplingBatch:
    """The parameters of some rows, whose logits have been constrained."""
    return SamplingBatch(
        temperature=sampling.temperature[mask],
        top_k=sampling.top_k[mask],
        top_p=sampling.top_p[mask],
        min_p=sampling.min_p[mask],
        seed=sampling.seed[mask],
        positions=sampling.positions[mask],
        forbidden_rows=np.empty(0, np.int64),
        forbidden_ids=np.empty(0, np.int64),
        edits=LogitEdits.pack([]),
        num_logprobs=sampling.num_logprobs[mask],
        masked_rows=np.empty(0, np.int64),
        allowed=(),
    )


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers as int64, so that one tensor takes them and ids."""
    return values.double().view(torch.int64)


def _values(bits: torch.Tensor) -> torch.Tensor:
    return bits.contiguous().view(torch.float64)
