"""Drawing of the CPU engine: the tokens of the torch sampler, the right distribution, and an end to every search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pdserve.engine.batch import SampleRequest, SamplingBatch, SequenceChunk, build_batch
from pdserve.engine.cpu.draw import NUM_CANDIDATES, argmax, candidates, draw, gumbel, kth_largest
from pdserve.engine.cpu.team import Team
from pdserve.engine.noise import row_keys
from pdserve.engine.sampler import gumbel_noise, sample
from pdserve.types import SamplingParams

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

VOCAB = 5000
"""More than the first two sizes of the search for candidates, and no multiple of a vector."""


def columns(params: Sequence[SamplingParams], positions: Sequence[int] | None = None) -> SamplingBatch:
    chunks = [
        SequenceChunk(token_ids=[0], start_position=p - 1, block_table=[0] * p, samples=(SampleRequest(params=q),))
        for q, p in zip(params, positions or [1] * len(params), strict=True)
    ]
    return build_batch(chunks, 1).sampling


def draw_rows(logits: Float32, sampling: SamplingBatch, threads: int = 1) -> Int64:
    """The kernel as the engine calls it."""
    rows, n = logits.shape
    stride = -(-n // 16) * 16
    padded = np.full((rows, stride), np.nan, np.float32)
    padded[:, :n] = logits
    greedy = sampling.is_greedy
    inverse = np.where(greedy, np.float32(0), np.float32(1) / np.where(greedy, 1, sampling.temperature))
    with np.errstate(divide="ignore"):
        log_min_p = np.log(sampling.min_p.astype(np.float64))
    tokens = np.full(rows, -1, np.int64)
    Team(threads).run(
        draw, np.zeros(1, np.int64), padded.reshape(-1), stride, n, inverse.astype(np.float32),
        sampling.top_k.astype(np.int64), sampling.top_p.astype(np.float64), log_min_p,
        row_keys(sampling.seed, sampling.positions).astype(np.int64), np.empty((threads, n), np.int64), tokens,
    )  # fmt: skip
    return tokens


def torch_rows(logits: Float32, sampling: SamplingBatch) -> Int64:
    return sample(torch.from_numpy(logits.copy()), sampling)


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 0.8, 1.0, 2.0, 5.0])),
        top_k=int(rng.choice([0, 0, 1, 5, 50, 256, 257, 2500, vocab_size, vocab_size + 7])),
        top_p=float(rng.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.99, 0.9999])),
        min_p=float(rng.choice([0.0, 0.0, 0.02, 0.5])),
        seed=int(rng.integers(0, 2**63)),
    )


def random_logits(rng: np.random.Generator, rows: int, n: int) -> Float32:
    """Peaked like those of a model, or flat, or with many ties."""
    logits = rng.standard_normal((rows, n)) * rng.choice([0.1, 1.0, 3.0, 6.0], (rows, 1))
    logits[::3] = np.round(logits[::3] * 2) / 2
    return logits.astype(np.float32)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 255, 256, 257, VOCAB])
def test_tokens_are_those_of_the_torch_sampler(n: int) -> None:
    """Rows of all kinds in one batch; the two compute masses and scores in different precisions."""
    rng = np.random.default_rng(n)
    rows = 200
    logits = random_logits(rng, rows, n)
    sampling = columns([random_params(rng, n) for _ in range(rows)], rng.integers(1, 1000, rows).tolist())
    tokens = draw_rows(logits, sampling)
    np.testing.assert_array_equal(tokens, torch_rows(logits, sampling))
    if n == VOCAB:
        assert len(set(tokens.tolist())) > 100


def test_a_row_does_not_depend_on_its_batch_or_on_threads() -> None:
    rng = np.random.default_rng(0)
    logits = random_logits(rng, 24, VOCAB)
    params = [random_params(rng, VOCAB) for _ in range(24)]
    together = draw_rows(logits, columns(params))
    alone = [draw_rows(logits[i : i + 1], columns([params[i]]))[0] for i in range(24)]
    assert together.tolist() == alone
    order = rng.permutation(24)
    moved = draw_rows(logits[order], columns([params[i] for i in order]), threads=3)
    np.testing.assert_array_equal(moved, together[order])


@pytest.mark.parametrize("n", [1, 7, 16, 40, 1003])
def test_the_first_of_equal_best_logits_is_taken(n: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(50):
        row = np.round(rng.standard_normal(n) * 2).astype(np.float32)
        padded = np.concatenate([[9, 9, 9], row, np.full(16, 9)]).astype(np.float32)
        assert argmax(padded, 3, n) == np.argmax(row)
    assert argmax(np.full(n + 16, -np.inf, np.float32), 0, n) == 0


@pytest.mark.parametrize("n", [1, 2, 3, 10, 500])
def test_the_kth_largest_is_that_of_a_sort(n: int) -> None:
    """Whatever the order: random, with ties, sorted both ways, all equal. A NaN must not lead out of the array."""
    rng = np.random.default_rng(n)
    usual = rng.standard_normal(n).astype(np.float32)
    cases = [usual, np.round(usual), np.sort(usual), np.sort(usual)[::-1].copy(), np.zeros(n, np.float32)]
    for values in cases:
        for k in {1, 2, n // 2, n - 1, n} & set(range(1, n + 1)):
            scratch = values.copy()
            assert kth_largest(scratch, k) == np.sort(values)[-k]
            np.testing.assert_array_equal(np.sort(scratch), np.sort(values))
    for share in (0.1, 0.5, 1.0):
        strange = np.where(rng.random(n) < share, np.float32(np.nan), usual)
        guarded = np.concatenate([[7], strange, [7]]).astype(np.float32)
        for k in range(1, n + 1):
            kth_largest(guarded[1:-1], k)
        np.testing.assert_array_equal(np.sort(guarded[1:-1]), np.sort(strange))
        assert (guarded[0], guarded[-1]) == (7, 7)


@pytest.mark.parametrize("k", [1, 2, 10, 63, 64, 256, 1000])
@pytest.mark.parametrize("n", [10, 256, 1003])
def test_candidates_are_those_of_a_full_sort(n: int, k: int) -> None:
    """The k best, with all that equal the last of them, best first, equals by id."""
    rng = np.random.default_rng(n + k)
    ids = np.empty(n, np.int64)
    for decimals in (6, 1, 0):
        row = np.round(rng.standard_normal(n), decimals).astype(np.float32)
        padded = np.concatenate([row, np.full(16, 9, np.float32)])
        order = np.lexsort((np.arange(n), -row))
        last = row[order[min(k, n) - 1]]
        found = candidates(padded, 0, n, min(k, n), ids)
        assert ids[:found].tolist() == order[row[order] >= last].tolist()


def test_noise_is_that_of_the_torch_sampler() -> None:
    keys = row_keys(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 5, 10**6]))
    ids = np.concatenate([np.arange(1000), [49151, 2**17 - 1]])
    ours = [[gumbel(np.int64(a), np.int64(b), np.int64(i)) for i in ids] for a, b in keys.tolist()]
    theirs = gumbel_noise(torch.from_numpy(keys.view(np.int32)), torch.from_numpy(ids)[None])
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=8),
        SamplingParams(temperature=1.5, top_p=0.7),
    ],
    ids=["plain", "cold", "top-k", "top-p"],
)
def test_frequencies_are_those_of_the_softmax(params: SamplingParams) -> None:
    """Pearson's chi-square of 20,000 draws from 40 tokens, at the 1e-6 level of 39 degrees of freedom."""
    n, draws = 40, 20_000
    row = (np.random.default_rng(5).standard_normal(n) * 1.2).astype(np.float32)
    p = np.exp(row.astype(np.float64) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if params.top_k:
        p[order[params.top_k :]] = 0
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
    p /= p.sum()
    seeds = [SamplingParams(**{f: getattr(params, f) for f in ("temperature", "top_k", "top_p")}, seed=s)
             for s in range(draws)]  # fmt: skip
    tokens = draw_rows(np.tile(row, (draws, 1)), columns(seeds))
    counts = np.bincount(tokens, minlength=n)
    assert not counts[p == 0].any()
    kept = p > 0
    chi_square = ((counts[kept] - draws * p[kept]) ** 2 / (draws * p[kept])).sum()
    assert chi_square < 105


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_k=VOCAB - 10),
        SamplingParams(temperature=1.0, top_k=VOCAB + 10),
        SamplingParams(temperature=50.0, top_p=0.9999999),
        SamplingParams(temperature=1.0, min_p=1e-30),
    ],
    ids=["greedy", "plain", "top-k", "large top-k", "larger than the vocabulary", "top-p keeps all", "min-p keeps all"],
)
def test_every_draw_ends_with_a_token_whatever_the_logits(params: SamplingParams) -> None:
    """Forbidden tokens are -inf: a search that waits for all of the vocabulary would never end. NaN is a bug of
    somebody else, and must not take the worker down."""
    rng = np.random.default_rng(0)
    usual = rng.standard_normal(VOCAB).astype(np.float32)
    some, one_left = usual.copy(), np.full(VOCAB, -np.inf, np.float32)
    some[::7] = -np.inf
    one_left[4321] = -3
    sampling = columns([params] * 2)
    for row in (some, one_left):
        tokens = draw_rows(np.stack([row, row]), sampling)
        assert tokens[0] == tokens[1]
        assert row[tokens[0]] > -np.inf
        np.testing.assert_array_equal(tokens, torch_rows(np.stack([row, row]), sampling))
    strange = usual.copy()
    strange[[3, 500]] = np.nan
    for row in (np.full(VOCAB, -np.inf, np.float32), np.full(VOCAB, np.nan, np.float32), strange):
        tokens = draw_rows(np.stack([usual, row]), sampling)
        assert 0 <= tokens[1] < VOCAB
        assert tokens[0] == draw_rows(usual[None], columns([params]))[0]


@pytest.mark.parametrize("distinct", [1, 2, 5])
def test_many_ties_are_kept_or_dropped_together(distinct: int) -> None:
    """More equal logits than candidates are looked at first."""
    logits = np.tile(np.arange(VOCAB) % distinct, (64, 1)).astype(np.float32)
    for params in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}, {"top_k": 300, "top_p": 0.9}):
        sampling = columns([SamplingParams(temperature=1.0, seed=s, **params) for s in range(64)])  # type: ignore[arg-type]
        tokens = draw_rows(logits, sampling)
        np.testing.assert_array_equal(tokens, torch_rows(logits, sampling))
        if params != {"top_p": 0.5}:
            assert set((tokens % distinct).tolist()) == {distinct - 1}
        assert len(set(tokens.tolist())) > 50
    assert VOCAB // distinct > NUM_CANDIDATES


def test_temperatures_at_the_border_of_greedy() -> None:
    rng = np.random.default_rng(1)
    logits = random_logits(rng, 40, VOCAB)
    for temperature in (1e-5, 2e-5, 1e-3):
        sampling = columns([SamplingParams(temperature=temperature, seed=s) for s in range(40)])
        np.testing.assert_array_equal(draw_rows(logits, sampling), torch_rows(logits, sampling))
