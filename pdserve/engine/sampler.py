"""Batched sampling in torch: greedy, temperature, top-k, top-p, min-p, with stateless seeded noise.

Bias and penalties come first (`logit_edits.py`), then forbidden tokens and masks, from which nothing can bring a token
back: its logit is -inf.

Filters apply in the order temperature, top-k, top-p (over the renormalised rest of top-k), min-p (relative to the
most likely token): the order of transformers. Each filter is a threshold on the logit, so tokens with equal logits
stay or go together, and what is kept never depends on how a sort breaks ties. Top-p keeps a token if the tokens
strictly more likely than it have less than top_p of the mass. The most likely token always stays.

Drawing is Gumbel-max: the kept token with the greatest `logit / temperature + noise(seed, position, id)` (see
`noise.py`). As noise belongs to the token id, a row can be drawn from its K best candidates alone, with the same
result for any K that covers what the filters keep. Rows where K does not cover it are drawn again from more
candidates, in the end from the whole vocabulary, and rows that no filter limits go there at once. Masses are summed as
integers, which makes the sums independent of order, K and batch.

A row's result depends on nothing but its own logits and parameters. Equal scores go to the lowest token id, also in
greedy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.batch import SamplingBatch
from pdserve.engine.device import to_host, upload
from pdserve.engine.logit_edits import BIAS, LARGEST_LOGIT, REPETITION, SUBTRACT, LogitEdits
from pdserve.engine.noise import MULTIPLIER_1, MULTIPLIER_2, row_keys

NUM_CANDIDATES = 256
_MASS_UNIT = float(2**44)
"""Mass of the most likely token in integer units: sums over 2**18 tokens fit in 63 bits."""

_BoolArray = npt.NDArray[np.bool_]


def sample(
    logits: torch.Tensor, sampling: SamplingBatch, num_candidates: int = NUM_CANDIDATES
) -> npt.NDArray[np.int64]:
    """Draw a token for each row of `logits` [R, V] (float32, any device; may be overwritten); [R].

    Copies to the host once, and once or twice more in the rare steps where some row is drawn again.
    """
    assert logits.shape[0] == len(sampling), "one row of parameters for each row of logits"
    if len(sampling) == 0:
        return np.empty(0, dtype=np.int64)
    constrain(logits, sampling)
    num_candidates = min(num_candidates, logits.shape[1])
    ways = RowWays.of(sampling, num_candidates)
    if ways.greedy.all():
        return to_host(logits.argmax(dim=-1))

    # [2, R] of (token, whether the candidates covered what the filters keep), so that one copy brings both to the host.
    drawn = torch.ones((2, len(sampling)), dtype=torch.int64, device=logits.device)
    if ways.greedy.any():
        rows = upload(np.flatnonzero(ways.greedy), logits.device)
        drawn[0, rows] = logits[rows].argmax(dim=-1)
    if ways.unfiltered.any():
        group = Rows.select(logits, sampling, ways.unfiltered)
        drawn[0, group.rows] = best_scored(group, group.scale(group.logits), _vocabulary(logits), None)[1]
    for mask, count in ((ways.narrow, num_candidates), (ways.wide, logits.shape[1])):
        if mask.any():
            group = Rows.select(logits, sampling, mask)
            drawn[:, group.rows] = _draw_filtered(group, count)
    host = to_host(drawn)
    tokens: npt.NDArray[np.int64] = host[0]
    covered = host[1]
    while not covered.all():
        # A sort of the whole vocabulary costs ten times as much as one of some thousand candidates.
        num_candidates = min(16 * num_candidates, logits.shape[1])
        again = covered == 0
        group = Rows.select(logits, sampling, again)
        tokens[again], covered[again] = to_host(_draw_filtered(group, num_candidates))
    return tokens


def constrain(logits: torch.Tensor, sampling: SamplingBatch) -> None:
    """Bias, penalties, forbidden tokens and masks, in place. Waits until the masks are known."""
    if len(sampling.edits):
        _edit(logits, sampling.edits)
    if len(sampling.forbidden_ids):
        rows, ids = upload(sampling.forbidden_rows, logits.device), upload(sampling.forbidden_ids, logits.device)
        logits.index_put_((rows, ids), logits.new_full((), -torch.inf))
    if len(sampling.masked_rows):
        _mask(logits, sampling)


@dataclass(frozen=True, eq=False, kw_only=True)
class RowWays:
    """How each row is drawn, [R] each; exactly one is set for a row."""

    greedy: _BoolArray
    unfiltered: _BoolArray
    """No filter limits it: from the whole vocabulary, without a sort."""
    narrow: _BoolArray
    """From the best candidates first."""
    wide: _BoolArray
    """Top-k keeps more than the candidates: from the whole vocabulary, sorted."""

    @classmethod
    def of(cls, sampling: SamplingBatch, num_candidates: int) -> RowWays:
        """By the parameters alone."""
        greedy = sampling.is_greedy
        unfiltered = ~greedy & (sampling.top_k <= 0) & (sampling.top_p >= 1.0) & (sampling.min_p <= 0.0)
        wide = ~greedy & ~unfiltered & (sampling.top_k >= num_candidates)
        return cls(greedy=greedy, unfiltered=unfiltered, narrow=~greedy & ~unfiltered & ~wide, wide=wide)


def _edit(logits: torch.Tensor, edits: LogitEdits) -> None:
    """`LogitEdits.apply` on the device of the logits."""
    where = upload(edits.rows, logits.device), upload(edits.ids, logits.device)
    terms = upload(edits.terms, logits.device)
    x = logits[where] + terms[BIAS]
    x = torch.where(x > 0, x / terms[REPETITION], x * terms[REPETITION]).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    logits.index_put_(where, x - terms[SUBTRACT])


def _mask(logits: torch.Tensor, sampling: SamplingBatch) -> None:
    """Leave the masked rows nothing but what they may draw."""
    words = upload(sampling.masks().view(np.int32), logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> bits) & 1).reshape(len(words), -1)[:, : logits.shape[1]]
    rows = upload(sampling.masked_rows, logits.device)
    logits[rows] = logits[rows].masked_fill(allowed == 0, -torch.inf)


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """Some rows of the batch with their parameters, on the device of the logits. N rows, all with a temperature."""

    rows: torch.Tensor
    """[N] int64 rows of the batch."""
    logits: torch.Tensor
    """[N, V] float32"""
    best: torch.Tensor
    """[N, 1] float32 greatest logit."""
    temperature: torch.Tensor
    """[N, 1] float64"""
    top_k: torch.Tensor
    """[N, 1] int64; the vocabulary size where all are kept."""
    top_p: torch.Tensor
    """[N, 1] float64"""
    log_min_p: torch.Tensor
    """[N, 1] float64; -inf where min-p is off."""
    keys: torch.Tensor
    """[N, 2] int32 key words of the noise."""
    whole_mass_rows: npt.NDArray[np.int64]
    """Which of the N need the mass of the whole vocabulary: those with top-p but no top-k. On the host."""

    @classmethod
    def select(
        cls, logits: torch.Tensor, sampling: SamplingBatch, mask: _BoolArray, vocab_size: int | None = None
    ) -> Rows:
        """The rows where `mask` [R] is set. `vocab_size`: of the model, where `logits` [R, V] are not all of a row."""

        def column(values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> torch.Tensor:
            return upload(values[:, None], logits.device)

        with np.errstate(divide="ignore"):
            log_min_p = np.log(sampling.min_p[mask].astype(np.float64))
        top_k = sampling.top_k[mask].astype(np.int64)
        vocab_size = vocab_size or logits.shape[1]
        top_k = np.where(top_k <= 0, vocab_size, np.minimum(top_k, vocab_size))
        keys = row_keys(sampling.seed[mask], sampling.positions[mask])
        rows = upload(np.flatnonzero(mask), logits.device)
        chosen = logits[rows]
        return cls(
            rows=rows,
            logits=chosen,
            best=chosen.amax(dim=-1, keepdim=True),
            temperature=column(sampling.temperature[mask].astype(np.float64)),
            top_k=column(top_k),
            top_p=column(sampling.top_p[mask].astype(np.float64)),
            log_min_p=column(log_min_p),
            keys=upload(keys.view(np.int32), logits.device),
            whole_mass_rows=np.flatnonzero((sampling.top_k[mask] <= 0) & (sampling.top_p[mask] < 1.0)),
        )

    def scale(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-weights of some logits [N, K] of these rows, float64: (logit - greatest logit) / temperature, <= 0."""
        return (logits.double() - self.best.double()) / self.temperature

    def whole_mass(self) -> torch.Tensor:
        """Mass of the whole vocabulary for each of `whole_mass_rows`, [W, 1] int64."""
        rows = upload(self.whole_mass_rows, self.logits.device)
        scaled = (self.logits[rows].double() - self.best[rows].double()) / self.temperature[rows]
        return _mass(scaled).sum(dim=-1, keepdim=True)


def _vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """All token ids, [1, V] int64."""
    return torch.arange(logits.shape[1], device=logits.device)[None]


def _draw_filtered(group: Rows, num_candidates: int) -> torch.Tensor:
    """Draw each row from its `num_candidates` most likely tokens; [2, N] of (token, whether the candidates suffice)."""
    candidates, ids = group.logits.topk(num_candidates, dim=-1)
    whole_mass = group.whole_mass() if len(group.whole_mass_rows) else None
    return draw_candidates(group, candidates, ids, whole_mass, is_all=num_candidates == group.logits.shape[1])


def draw_candidates(
    group: Rows, candidates: torch.Tensor, ids: torch.Tensor, whole_mass: torch.Tensor | None, *, is_all: bool
) -> torch.Tensor:
    """Draw each row from `candidates` [N, K], its greatest logits in descending order, with token ids `ids` [N, K].

    `whole_mass` is that of `Rows.whole_mass`, None if no row needs it. `is_all`: there are no other tokens. Gives
    [2, N] of (token, whether the candidates suffice).
    """
    num_candidates = candidates.shape[1]
    scaled = group.scale(candidates)
    # Places of candidates in their row: 0 ... k-1 | k ... K-1; the k-th best sets the threshold of top-k.
    kth = candidates.gather(1, group.top_k.clamp(max=num_candidates) - 1)
    keep = (candidates >= kth) & (candidates > -torch.inf)

    mass = _mass(scaled).masked_fill(~keep, 0)
    total = mass.sum(dim=-1, keepdim=True)
    if whole_mass is not None:
        total[upload(group.whole_mass_rows, total.device)] = whole_mass
    before = mass.cumsum(dim=-1) - mass
    # Tokens with equal logits count from the first of them: `before` grows along the row, so the last group start wins.
    starts_group = torch.ones_like(keep)
    starts_group[:, 1:] = candidates[:, 1:] < candidates[:, :-1]
    strictly_before = before.masked_fill(~starts_group, 0).cummax(dim=-1).values
    keep &= (strictly_before.double() < group.top_p * total.double()) | (group.top_p >= 1.0) | (scaled == 0.0)
    keep &= scaled >= group.log_min_p

    # If the last candidate goes, so does every token behind it.
    covered = torch.ones_like(keep[:, -1]) if is_all else ~keep[:, -1]
    return torch.stack([best_scored(group, scaled, ids, keep)[1], covered.long()])


def best_scored(
    group: Rows, scaled: torch.Tensor, ids: torch.Tensor, keep: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Gumbel-max token of each row among `ids` ([N, K] or [1, K]) with log-weights `scaled` [N, K]: its score [N]
    float64, and its id [N]."""
    score = scaled + gumbel_noise(group.keys, ids)
    if keep is not None:
        score = score.masked_fill(~keep, -torch.inf)
    best = score.amax(dim=-1, keepdim=True)
    return best[:, 0], ids.masked_fill(score != best, torch.iinfo(torch.int64).max).amin(dim=-1)


def _mass(scaled: torch.Tensor) -> torch.Tensor:
    """Probability mass in integer units, unnormalised: exact to add in any order."""
    return (scaled.exp() * _MASS_UNIT).long()


def gumbel_noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [N, K] float64 of `keys` [N, 2] int32 for `ids` [N or 1, K], as `noise.py` defines it."""
    x = _mix(keys[:, :1] ^ _mix(ids.to(torch.int32)))
    y = _mix(keys[:, 1:] ^ x)
    high = x.long() & 0xFFFFFFFF
    low = (y.long() >> 12) & 0xFFFFF
    v = (((high << 20) | low).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log1p(-v))


def _mix(words: torch.Tensor) -> torch.Tensor:
    """`noise.mix` on int32 lanes: products wrap, and the masks make the arithmetic shifts logical."""
    words = (words ^ ((words >> 16) & 0xFFFF)) * MULTIPLIER_1
    words = (words ^ ((words >> 15) & 0x1FFFF)) * (MULTIPLIER_2 - 2**32)
    return words ^ ((words >> 16) & 0xFFFF)
