"""The sampler against an independent softmax, and what a draw must and must not depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pdserve.engine.batch import SampleRequest, SamplingBatch, SequenceChunk, build_batch
from pdserve.engine.sampler import gumbel_noise, sample
from pdserve.types import SamplingParams

Float = npt.NDArray[np.float64]


def columns(
    params: Sequence[SamplingParams],
    positions: Sequence[int] | None = None,
    forbidden: Sequence[tuple[int, ...]] | None = None,
) -> SamplingBatch:
    """The sampling part of a batch of single tokens, the drawn token of row i being at `positions[i]`."""
    at = positions or [1] * len(params)
    ids = forbidden or [()] * len(params)
    chunks = [
        SequenceChunk(
            token_ids=[0],
            start_position=p - 1,
            block_table=[0],
            samples=(SampleRequest(params=s, forbidden_token_ids=f),),
        )
        for s, p, f in zip(params, at, ids, strict=True)
    ]
    return build_batch(chunks, 1 << 20).sampling


def draws(logits: Float, params: SamplingParams, n: int) -> npt.NDArray[np.int64]:
    """`n` draws from the same logits, at positions 1 ... n."""
    rows = torch.from_numpy(logits.astype(np.float32)).expand(n, -1).contiguous()
    return sample(rows, columns([params] * n, list(range(1, n + 1))))


def filtered_softmax(logits: Float, params: SamplingParams) -> Float:
    """The distribution to draw from: temperature, top-k, top-p, min-p, one after the other."""
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        mass = 0.0
        for i in order:
            if mass >= params.top_p:
                p[i] = 0
            mass += p[i]
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.5, seed=2),
        SamplingParams(temperature=2.0, seed=3),
        SamplingParams(top_k=1, seed=4),
        SamplingParams(top_k=5, seed=5),
        SamplingParams(top_p=0.7, seed=6),
        SamplingParams(min_p=0.1, seed=7),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05, seed=2**63 + 8),
    ],
    ids=str,
)
def test_frequencies_match_an_independent_softmax(params: SamplingParams) -> None:
    check_frequencies(np.random.default_rng(0).normal(size=64) * 2, params, n=20_000)


def test_top_p_is_a_share_of_the_whole_vocabulary() -> None:
    """60 % of the mass of 1000 tokens, not of the 256 candidates that are looked at: about 50 tokens instead of 22."""
    check_frequencies(-np.log(np.arange(1.0, 1001.0)), SamplingParams(top_p=0.6, seed=11), n=4000)


def test_equal_logits_stay_or_go_together_in_top_p() -> None:
    """One token, then ten equal ones: the cut falls among the ten, of which a sort could keep any two."""
    logits = np.zeros(100)
    logits[:11] = [6.0, *[5.0] * 10]
    assert set(draws(logits, SamplingParams(top_p=0.3, seed=3), 600).tolist()) == set(range(11))


def check_frequencies(logits: Float, params: SamplingParams, n: int) -> None:
    """`n` draws are spread as `filtered_softmax` says."""
    expected = filtered_softmax(logits, params)
    counts = np.bincount(draws(logits, params, n), minlength=len(logits))
    assert not counts[expected == 0].any(), "drew a token that a filter removes"
    # Pearson's statistic over the tokens expected often enough, the rest as one: mean `degrees`, variance twice that.
    often = expected * n >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * n
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert statistic <= degrees + 4 * math.sqrt(2 * max(degrees, 1)), (statistic, degrees)


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    vocab, n = 49_152, 384
    tail_mass = 0.2
    logits = np.full(vocab, math.log(tail_mass / (vocab - 1)))
    logits[0] = math.log(1 - tail_mass)
    drawn = np.concatenate([draws(logits, SamplingParams(seed=s), n // 16) for s in range(16)])
    tail = int((drawn != 0).sum())
    assert abs(tail - n * tail_mass) < 4 * math.sqrt(n * tail_mass * (1 - tail_mass))
    assert len(set(drawn[drawn != 0].tolist())) > 0.95 * tail, "tail tokens should hardly ever repeat"


def test_the_upper_tail_of_the_noise_is_fine_and_of_the_right_weight() -> None:
    """Noise from 24 random bits ends at 17.3 and repeats long before that: the rarest tokens would never be drawn."""
    keys = torch.from_numpy(np.random.default_rng(2).integers(-(2**31), 2**31, size=(64, 2)).astype(np.int32))
    noise = gumbel_noise(keys, torch.arange(65_536)[None]).flatten()
    assert len(noise[noise > 8].unique()) == int((noise > 8).sum())
    for threshold in (0.0, 4.0, 8.0, 11.0):
        expected = len(noise) * -math.expm1(-math.exp(-threshold))
        assert abs(int((noise > threshold).sum()) - expected) < 4 * math.sqrt(expected)
    assert noise.isfinite().all()


def random_rows(rows: int, vocab: int) -> tuple[torch.Tensor, list[SamplingParams], list[int]]:
    """Logits and parameters of every kind, at random positions."""
    rng = np.random.default_rng(rows)
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32) * 3)
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
            top_k=int(rng.choice([0, 1, 40, 500])),
            top_p=float(rng.choice([1.0, 0.95, 0.5])),
            min_p=float(rng.choice([0.0, 0.02])),
            seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        )
        for _ in range(rows)
    ]
    return logits, params, rng.integers(1, 5000, size=rows).tolist()


def test_a_row_draws_the_same_token_alone_batched_and_in_any_order() -> None:
    """O-SAM-3."""
    logits, params, positions = random_rows(48, 1000)
    together = sample(logits.clone(), columns(params, positions))
    alone = [int(sample(logits[i : i + 1].clone(), columns([params[i]], [positions[i]]))[0]) for i in range(48)]
    assert together.tolist() == alone
    order = np.random.default_rng(1).permutation(48)
    permuted = sample(logits[order].clone(), columns([params[i] for i in order], [positions[i] for i in order]))
    assert permuted.tolist() == together[order].tolist()


@pytest.mark.parametrize("num_candidates", [1, 2, 16, 64, 256, 999, 1000])
def test_the_number_of_candidates_never_changes_a_token(num_candidates: int) -> None:
    logits, params, positions = random_rows(48, 1000)
    expected = sample(logits.clone(), columns(params, positions), num_candidates=10_000)
    assert (
        sample(logits.clone(), columns(params, positions), num_candidates=num_candidates).tolist() == expected.tolist()
    )


def test_equal_logits_at_the_edge_of_the_candidates_stay_or_go_together() -> None:
    """300 equal logits and top_k 10: all 300 are the 10th best, whichever of them a sort puts first."""
    logits = torch.zeros((64, 400))
    logits[:, 300:] = -1.0
    params = [SamplingParams(top_k=10, seed=s) for s in range(64)]
    few = sample(logits.clone(), columns(params), num_candidates=16)
    assert few.tolist() == sample(logits.clone(), columns(params), num_candidates=400).tolist()
    assert few.max() < 300
    assert len(set(few.tolist())) > 40


@pytest.mark.parametrize("change", [1, 2**31, 2**32, 2**63], ids=["lowest bit", "bit 31", "bit 32", "highest bit"])
def test_every_part_of_the_seed_matters(change: int) -> None:
    logits = np.zeros(1000)
    one = draws(logits, SamplingParams(seed=12345), 32)
    other = draws(logits, SamplingParams(seed=12345 ^ change), 32)
    assert (one == other).sum() <= 2


def test_another_position_is_another_draw_and_the_same_one_repeats() -> None:
    logits = np.zeros(1000)
    first = draws(logits, SamplingParams(seed=5), 64)
    assert len(set(first.tolist())) > 50
    assert draws(logits, SamplingParams(seed=5), 64).tolist() == first.tolist()


def test_rows_with_neighbouring_seeds_and_positions_are_independent() -> None:
    """Of 32 x 32 draws from 1024 equal tokens, about 63 % are distinct, as for independent ones."""
    logits = torch.zeros((32 * 32, 1024))
    params = [SamplingParams(seed=s) for s in range(32) for _ in range(32)]
    drawn = sample(logits, columns(params, [p for _ in range(32) for p in range(1, 33)]))
    assert abs(len(set(drawn.tolist())) / 1024 - (1 - math.exp(-1))) < 0.04


def test_greedy_takes_the_lowest_of_equal_best_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert sample(logits.clone(), columns([SamplingParams(temperature=0.0)])).tolist() == [1]
    mixed = sample(logits.repeat(2, 1), columns([SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)]))
    assert mixed[0] == 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-12, 1e-6, 1e-4, 1e-2])
def test_tiny_temperatures_give_the_greedy_token(temperature: float) -> None:
    """O-VAL-4."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(16, 500)).astype(np.float32) * 100)
    assert sample(logits.clone(), columns([SamplingParams(temperature=temperature)] * 16)).tolist() == (
        logits.argmax(-1).tolist()
    )


@pytest.mark.parametrize("top_p", [1e-9, 1e-30, 0.0])
def test_a_tiny_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    logits, _, _ = random_rows(16, 500)
    drawn = sample(logits.clone(), columns([SamplingParams(top_p=top_p, seed=s) for s in range(16)]))
    assert drawn.tolist() == logits.argmax(-1).tolist()


def test_min_p_of_one_keeps_the_most_likely_token() -> None:
    logits, _, _ = random_rows(16, 500)
    drawn = sample(logits.clone(), columns([SamplingParams(min_p=1.0, seed=s) for s in range(16)]))
    assert drawn.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)], ids=str
)
def test_forbidden_tokens_are_never_drawn_and_only_in_their_row(params: SamplingParams) -> None:
    """O-SAM-2: with a stop id that would win by far."""
    logits = torch.zeros((4, 50))
    logits[:, 7] = 100.0
    logits[:, 9] = 90.0
    drawn = sample(logits, columns([params] * 4, forbidden=[(), (7,), (7, 9), ()]))
    assert drawn[[0, 1, 3]].tolist() == [7, 9, 7]
    assert drawn[2] not in (7, 9)


def scalar_noise(seed: int, position: int, token_id: int) -> float:
    """The noise of `noise.py`, once more, in Python integers."""

    def mix(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x7FEB352D) % 2**32
        h = ((h ^ (h >> 15)) * 0x846CA68B) % 2**32
        return h ^ (h >> 16)

    golden = 0x9E3779B9
    after_seed = mix((mix((golden) ^ (seed % 2**32)) + golden) % 2**32 ^ (seed >> 32))
    key = mix((mix((after_seed + golden) % 2**32 ^ (position % 2**32)) + golden) % 2**32 ^ (position >> 32))
    second = mix((key + golden) % 2**32 ^ after_seed)
    x = mix(key ^ mix(token_id))
    y = mix(second ^ x)
    v = (x * 2**20 + (y >> 12) + 0.5) / 2**52
    return -math.log(-math.log1p(-v))


def test_tokens_are_those_of_the_published_noise() -> None:
    """Known answers: another engine, or another version, has to draw these very tokens."""
    rng = np.random.default_rng(9)
    logits = rng.normal(size=(24, 200)).astype(np.float32)
    seeds = [int(s) for s in rng.integers(0, 2**64, size=24, dtype=np.uint64)]
    positions = rng.integers(1, 1 << 13, size=24).tolist()
    expected = [
        int(np.argmax([float(logits[i, t]) + scalar_noise(seeds[i], positions[i], t) for t in range(200)]))
        for i in range(24)
    ]
    params = [SamplingParams(temperature=1.0, seed=s) for s in seeds]
    assert sample(torch.from_numpy(logits), columns(params, positions)).tolist() == expected
