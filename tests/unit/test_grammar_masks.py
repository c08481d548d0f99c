"""Masks in both samplers: the tokens of a plain softmax over what is allowed, whatever the filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.batch import SampleRequest, SamplingBatch, SequenceChunk, build_batch
from pdserve.engine.cpu.draw import draw, greedy, mask
from pdserve.engine.cpu.team import Team
from pdserve.engine.logit_edits import SequenceEdits
from pdserve.engine.noise import row_keys
from pdserve.engine.sampler import gumbel_noise, sample
from pdserve.types import GenerationJob, SamplingParams

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Sampler = Callable[[Float32, SamplingBatch], Int64]


def pack(allowed: Bool) -> npt.NDArray[np.uint32]:
    """Bits as `SampleRequest.allowed` gives them."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def columns(requests: Sequence[SampleRequest]) -> SamplingBatch:
    chunks = [
        SequenceChunk(token_ids=[0], start_position=i, block_table=[0] * (i + 1), samples=(request,))
        for i, request in enumerate(requests)
    ]
    return build_batch(chunks, 1).sampling


def torch_rows(logits: Float32, sampling: SamplingBatch) -> Int64:
    return sample(torch.from_numpy(logits.copy()), sampling)


def kernel_rows(logits: Float32, sampling: SamplingBatch) -> Int64:
    """The kernels as the CPU engine calls them."""
    rows, n = logits.shape
    stride = -(-n // 16) * 16
    padded = np.full((rows, stride), np.nan, np.float32)
    padded[:, :n] = logits
    flat = padded.reshape(-1)
    team = Team(1)
    if len(sampling.masked_rows):
        team.run(mask, np.zeros(1, np.int64), flat, stride, n, sampling.masked_rows, sampling.masks())
    tokens = np.full(rows, -1, np.int64)
    is_greedy = sampling.is_greedy
    if is_greedy.all():
        team.run(greedy, np.zeros(1, np.int64), flat, stride, n, tokens)
        return tokens
    inverse = np.where(is_greedy, np.float32(0), np.float32(1) / np.where(is_greedy, 1, sampling.temperature))
    with np.errstate(divide="ignore"):
        log_min_p = np.log(sampling.min_p.astype(np.float64))
    team.run(
        draw, np.zeros(1, np.int64), flat, stride, n, inverse.astype(np.float32), sampling.top_k.astype(np.int64),
        sampling.top_p.astype(np.float64), log_min_p, row_keys(sampling.seed, sampling.positions).astype(np.int64),
        np.empty((1, n), np.int64), tokens,
    )  # fmt: skip
    return tokens


SAMPLERS: list[Sampler] = [torch_rows, kernel_rows]


def oracle(logits: Float32, allowed: Bool, params: SamplingParams, keys: npt.NDArray[np.uint32]) -> set[int]:
    """The tokens that may win a row: one, but for filters that rounding of a mass could decide either way.

    Softmax over the allowed tokens alone, in float64, then top-k, top-p and min-p over sorted probabilities, then
    Gumbel-max over what is left.
    """
    ids = np.flatnonzero(allowed)
    x = logits[ids].astype(np.float64)
    if params.temperature == 0:
        return {int(ids[np.argmax(x)])}
    scaled = x / params.temperature
    noise = gumbel_noise(torch.from_numpy(keys.view(np.int32))[None], torch.from_numpy(ids)[None]).numpy()[0]
    winners = set()
    for margin in (-1e-4, 1e-4):
        kept = np.ones(len(ids), np.bool_)
        if params.top_k:
            kept &= x >= np.sort(x)[::-1][min(params.top_k, len(x)) - 1]
        p = np.where(kept, np.exp(scaled - scaled.max()), 0)
        p /= p.sum()
        if params.top_p < 1:
            kept &= (np.array([p[x > value].sum() for value in x]) < params.top_p + margin) | (x == x.max())
        kept &= p >= p.max() * params.min_p * (1 + margin)
        winners.add(int(ids[np.argmax(np.where(kept, scaled + noise, -np.inf))]))
    return winners


def random_params(rng: np.random.Generator, n: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.5, 1.0, 1.5])),
        top_k=int(rng.choice([0, 0, 1, 3, 40, 256, n])),
        top_p=float(rng.choice([1.0, 1.0, 0.3, 0.9])),
        min_p=float(rng.choice([0.0, 0.0, 0.1])),
        seed=int(rng.integers(0, 2**63)),
    )


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("n", [1, 31, 32, 33, 500, 5001])
def test_only_allowed_tokens_are_drawn_and_as_softmax_over_them_would(sampler: Sampler, n: int) -> None:
    """Rows with and without masks, masks of one token to all but one, the best token forbidden among them."""
    rng = np.random.default_rng(n)
    rows = 60
    logits = (rng.standard_normal((rows, n)) * rng.choice([0.5, 2.0, 6.0], (rows, 1))).astype(np.float32)
    params = [random_params(rng, n) for _ in range(rows)]
    shares = rng.choice([0.0, 0.001, 0.05, 0.5, 0.999], rows)
    allowed = rng.random((rows, n)) < shares[:, None]
    best = logits.argmax(axis=1)
    allowed[np.arange(rows), best] &= rng.random(rows) < 0.3
    allowed[np.arange(rows), rng.integers(0, n, rows)] = True
    masked = rng.random(rows) < 0.7
    requests = [
        SampleRequest(params=p, allowed=(lambda row=row: pack(allowed[row])) if masked[row] else None)
        for row, p in enumerate(params)
    ]
    sampling = columns(requests)
    keys = row_keys(sampling.seed, sampling.positions)
    tokens = sampler(logits, sampling)
    for row in range(rows):
        open_to = allowed[row] if masked[row] else np.ones(n, np.bool_)
        assert int(tokens[row]) in oracle(logits[row], open_to, params[row], keys[row]), (row, params[row])


@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_mask_draws_what_a_vocabulary_without_the_others_would(sampler: Sampler, data: st.DataObject) -> None:
    """Any mask and parameters: the same token as with the logits of all others at minus infinity."""
    n = data.draw(st.sampled_from([3, 40, 700]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    allowed = rng.random(n) < data.draw(st.sampled_from([0.01, 0.5, 0.99]))
    allowed[data.draw(st.integers(0, n - 1))] = True
    logits = rng.standard_normal((1, n)).astype(np.float32) * 3
    params = random_params(rng, n)
    (token,) = sampler(logits, columns([SampleRequest(params=params, allowed=lambda: pack(allowed))]))
    assert allowed[token]
    excluded = np.where(allowed, logits, np.float32(-np.inf))
    assert token == sampler(excluded, columns([SampleRequest(params=params)]))[0]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_drawn_has_the_probabilities_of_softmax_over_what_is_allowed(sampler: Sampler) -> None:
    n, draws = 50, 4000
    rng = np.random.default_rng(5)
    logits = rng.standard_normal(n).astype(np.float32)
    allowed = np.zeros(n, np.bool_)
    allowed[rng.choice(n, 6, replace=False)] = True
    bits = pack(allowed)
    requests = [
        SampleRequest(params=SamplingParams(temperature=1.0, seed=i), allowed=lambda: bits) for i in range(draws)
    ]
    tokens = sampler(np.tile(logits, (draws, 1)), columns(requests))
    p = np.where(allowed, np.exp(logits.astype(np.float64)), 0)
    p /= p.sum()
    found = np.bincount(tokens, minlength=n) / draws
    assert (found[~allowed] == 0).all()
    # Five standard deviations.
    assert (np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / draws)).all()


def test_bias_comes_before_the_mask() -> None:
    """No bias brings back a token that is not allowed; among those that are, it counts."""
    n = 40
    logits = np.zeros((1, n), np.float32)
    params = SamplingParams(temperature=0.0, logit_bias=((3, 100.0), (7, 1.0)))
    edits = SequenceEdits(params, (), ()).row()
    allowed = np.zeros(n, np.bool_)
    allowed[[5, 7, 9]] = True
    request = SampleRequest(params=params, edits=edits, allowed=lambda: pack(allowed))
    assert torch_rows(logits, columns([request])) == [7]


def test_a_grammar_answers_for_stop_ids_itself() -> None:
    """Before `min_new_tokens` stop ids are forbidden, unless there is a mask, which may have nothing else."""
    job = GenerationJob(
        request_id="q", attempt=1, router_id="r", token_ids=(1,), num_prompt_tokens=1, max_new_tokens=9,
        min_new_tokens=5, stop_token_ids=(2,),
    )  # fmt: skip
    assert SampleRequest.for_job(job, 0, None).forbidden_token_ids == (2,)
    masked = SampleRequest.for_job(job, 0, None, lambda: pack(np.arange(40) == 2))
    assert masked.forbidden_token_ids == ()
    assert torch_rows(np.zeros((1, 40), np.float32), columns([masked])) == [2]
