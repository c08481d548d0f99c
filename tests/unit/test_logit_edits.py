"""Bias and penalties against plain loops, and log-probabilities against a plain log-softmax."""

from __future__ import annotations

import collections
import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pdserve.engine.batch import SampleRequest, SamplingBatch, ScoreRequest, SequenceChunk, build_batch
from pdserve.engine.logit_edits import LogitEdits, RowEdits, SequenceEdits
from pdserve.engine.logprobs import raw_logprobs
from pdserve.engine.output import Logprobs, StepOutput
from pdserve.engine.sampler import sample
from pdserve.types import GenerationJob, SamplingParams

VOCAB = 60
CPU = torch.device("cpu")
Floats = npt.NDArray[np.float32]


def job(
    prompt: list[int], output: list[int], sampling: SamplingParams, num_prompt_logprobs: int | None = None
) -> GenerationJob:
    return GenerationJob(
        request_id="q",
        attempt=1,
        router_id="r",
        token_ids=(*prompt, *output),
        num_prompt_tokens=len(prompt),
        max_new_tokens=1000,
        sampling=sampling,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def edited(logits: Floats, prompt: list[int], output: list[int], params: SamplingParams) -> Floats:
    """What one row of logits becomes, token by token."""
    counts = collections.Counter(output)
    result = []
    for token, logit in enumerate(logits.tolist()):
        x = logit + dict(params.logit_bias).get(token, 0.0)
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        if counts[token]:
            x -= params.presence_penalty + params.frequency_penalty * counts[token]
        result.append(x)
    return np.array(result, dtype=np.float32)


def columns(edits: list[RowEdits | None], params: SamplingParams, **request: tuple[int, ...]) -> SamplingBatch:
    chunks = [
        SequenceChunk(
            token_ids=[0],
            start_position=i,
            block_table=[0],
            samples=(SampleRequest(params=params, edits=row, **request),),  # type: ignore[arg-type]
        )
        for i, row in enumerate(edits)
    ]
    return build_batch(chunks, 1 << 20).sampling


PARAMS = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.5),
    SamplingParams(presence_penalty=2.0),
    SamplingParams(frequency_penalty=-0.7),
    SamplingParams(logit_bias=((3, 100.0), (59, -100.0))),
    SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.7, logit_bias=((0, 5.5), (7, -1.25))
    ),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("num_output", [0, 1, 200])
def test_logits_are_edited_as_a_plain_loop_does_it(params: SamplingParams, num_output: int) -> None:
    """On numpy and on torch, with and without neighbours."""
    rng = np.random.default_rng(num_output)
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32) * 4
    prompt, output = rng.integers(0, VOCAB, size=30).tolist(), rng.integers(0, VOCAB, size=num_output).tolist()
    edits = SequenceEdits.for_job(job(prompt, output, params))
    assert edits is not None
    expected = logits.copy()
    expected[1] = edited(logits[1], prompt, output, params)

    host = logits.copy()
    LogitEdits.pack([None, edits.row(), None]).apply(host)
    np.testing.assert_allclose(host, expected, rtol=1e-5, atol=1e-5)
    device = torch.from_numpy(logits.copy())
    drawn = sample(device, columns([None, edits.row(), None], SamplingParams(temperature=0.0)))
    np.testing.assert_allclose(device.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert drawn.tolist() == expected.argmax(axis=1).tolist()


def test_a_request_without_bias_and_penalties_has_no_edits() -> None:
    assert SequenceEdits.for_job(job([1], [], SamplingParams(temperature=0.3, top_k=4, min_p=0.1))) is None
    assert len(LogitEdits.pack([None, None])) == 0


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("num_replayed", [0, 1, 17, 39])
def test_a_replayed_request_has_the_edits_of_an_undisturbed_one(params: SamplingParams, num_replayed: int) -> None:
    """O-SAM-4: what earlier attempts drew is output, although it comes with the prompt."""
    rng = np.random.default_rng(5)
    prompt, output = rng.integers(0, VOCAB, size=20).tolist(), rng.integers(0, VOCAB, size=40).tolist()
    whole = SequenceEdits.for_job(job(prompt, [], params))
    replayed = SequenceEdits.for_job(job(prompt, output[:num_replayed], params))
    assert whole is not None and replayed is not None
    for index, token in enumerate(output):
        whole.observe(index, token)
    for index, token in enumerate(output[num_replayed:], start=num_replayed):
        replayed.observe(index, token)
    results = []
    for edits in (whole, replayed):
        logits = np.linspace(-3, 3, VOCAB, dtype=np.float32)[None].copy()
        LogitEdits.pack([edits.row()]).apply(logits)
        results.append(logits.tobytes())
    assert results[0] == results[1]
    assert np.frombuffer(results[0], np.float32) == pytest.approx(
        edited(np.linspace(-3, 3, VOCAB, dtype=np.float32), prompt, output, params), abs=1e-5
    )


def test_a_token_that_is_observed_again_counts_once_and_a_gap_is_a_bug() -> None:
    """A step that is computed again after a preemption names the same token again."""
    edits = SequenceEdits(SamplingParams(frequency_penalty=1.0), [9], [])
    edits.observe(0, 4)
    edits.observe(1, 4)
    edits.observe(1, 4)
    assert (edits.row().ids.tolist(), edits.row().terms[2].tolist()) == ([4], [2.0])
    with pytest.raises(AssertionError, match="output token 5"):
        edits.observe(5, 4)


def test_a_tiny_repetition_penalty_still_leaves_a_distribution() -> None:
    logits = np.linspace(-50, 50, VOCAB, dtype=np.float32)[None].copy()
    row = SequenceEdits(SamplingParams(repetition_penalty=1e-45), list(range(VOCAB)), []).row()
    device = torch.from_numpy(logits.copy())
    drawn = sample(device, columns([row], SamplingParams(temperature=1.0, top_p=0.9)))
    assert torch.isfinite(device).all()
    assert 0 <= drawn[0] < VOCAB
    LogitEdits.pack([row]).apply(logits)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_bias_brings_a_forbidden_token_back(temperature: float) -> None:
    """O-SAM-2: logit_bias +100 on a stop id before min_tokens."""
    params = SamplingParams(temperature=temperature, logit_bias=((2, 100.0),))
    row = SequenceEdits(params, [1], []).row()
    logits = torch.zeros((1, VOCAB))
    assert sample(logits.clone(), columns([row], params)).tolist() == [2]
    assert sample(logits.clone(), columns([row], params, forbidden_token_ids=(2,))).tolist() != [2]


def test_penalised_draws_are_spread_as_the_edited_softmax_says() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=VOCAB).astype(np.float32)
    prompt, output = [1, 2, 3], [4, 4, 5, 6]
    params = SamplingParams(
        temperature=0.8, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.4, logit_bias=((9, 2.0),)
    )
    row = SequenceEdits(params, prompt, output).row()
    n = 20_000
    drawn = sample(torch.from_numpy(np.repeat(logits[None], n, axis=0)), columns([row] * n, params))
    weights = np.exp(edited(logits, prompt, output, params).astype(np.float64) / params.temperature)
    expected = n * weights / weights.sum()
    counts = np.bincount(drawn, minlength=VOCAB)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < VOCAB - 1 + 4 * math.sqrt(2 * (VOCAB - 1))


# Log-probabilities ----------------------------------------------------------------------------------------------------


def plain(logits: Floats) -> npt.NDArray[np.float64]:
    """Log-softmax of each row."""
    wide = logits.astype(np.float64)
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


@pytest.mark.parametrize("num_top", [0, 1, 3, 20, VOCAB, VOCAB + 5])
@pytest.mark.parametrize("rows_per_slice", [1, 3, 100])
def test_logprobs_are_the_log_softmax_and_the_lists_are_the_most_likely(num_top: int, rows_per_slice: int) -> None:
    rng = np.random.default_rng(num_top)
    logits = rng.normal(size=(7, VOCAB)).astype(np.float32) * 5
    token_ids = rng.integers(0, VOCAB, size=7)
    expected = plain(logits)
    slices = torch.from_numpy(logits).split(rows_per_slice)  # type: ignore[no-untyped-call]
    for found in (Logprobs.of(logits, token_ids, num_top), raw_logprobs(slices, token_ids, num_top, CPU)):
        assert found.token_ids.tolist() == token_ids.tolist()
        np.testing.assert_allclose(found.logprobs, expected[np.arange(7), token_ids], atol=1e-5)
        order = np.argsort(-expected, axis=1)[:, :num_top]
        assert found.top_ids.tolist() == order.tolist()
        np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(expected, order, 1), atol=1e-5)


def test_logprobs_of_huge_logits_are_finite() -> None:
    logits = np.array([[1e30, 0.0, -1e30]], dtype=np.float32)
    for found in (
        Logprobs.of(logits, np.array([0]), 2),
        raw_logprobs([torch.from_numpy(logits)], np.array([0]), 2, CPU),
    ):
        assert found.logprobs.tolist() == [0.0]
        assert found.top_ids.tolist() == [[0, 1]]


def test_each_row_gets_as_many_of_the_most_likely_tokens_as_it_asked_for() -> None:
    wanted = [None, 2, 0, None, 3]
    chunks = [
        SequenceChunk(
            token_ids=[0], start_position=0, block_table=[0], samples=(SampleRequest(params=PARAMS[0], num_logprobs=n),)
        )
        for n in wanted
    ]
    batch = build_batch(chunks, 16)
    assert batch.sampling.logprob_rows.tolist() == [1, 2, 4]
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32)
    output = StepOutput(token_ids=np.array([5, 6, 7, 8, 9]), logprobs=Logprobs.of(logits, np.array([6, 7, 9]), 3))
    found = output.drawn_logprobs(batch)
    assert {row: (t.token_id, len(t.top)) for row, t in found.items()} == {1: (6, 2), 2: (7, 0), 4: (9, 3)}
    assert StepOutput(token_ids=output.token_ids).drawn_logprobs(batch) == {}


def test_prompt_scores_go_to_the_sequence_that_asked_and_stop_at_the_end_of_the_prompt() -> None:
    asking = job(list(range(10, 16)), [30, 31], SamplingParams(), num_prompt_logprobs=2)
    chunks = [
        SequenceChunk(token_ids=[1, 2], start_position=0, block_table=[0]),
        # The second chunk of three: tokens 2, 3, 4, followed by 3, 4, 5.
        SequenceChunk(
            token_ids=asking.token_ids[2:5],
            start_position=2,
            block_table=[1],
            score=ScoreRequest.for_prompt(asking, 2, 3),
        ),
        # The last chunk of a replayed request: only the token before the prompt's last one is followed by a part of it.
        SequenceChunk(
            token_ids=asking.token_ids[4:8],
            start_position=4,
            block_table=[2],
            score=ScoreRequest.for_prompt(asking, 4, 4),
        ),
    ]
    batch = build_batch(chunks, 16)
    assert batch.scoring.rows.tolist() == [2, 3, 4, 5]
    assert batch.scoring.target_ids.tolist() == [13, 14, 15, 15]
    assert batch.output_rows.tolist() == [2, 3, 4, 5]
    logits = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32)
    output = StepOutput(
        token_ids=np.empty(0, np.int64), prompt_logprobs=Logprobs.of(logits, batch.scoring.target_ids, 2)
    )
    scored = output.scored_prompts(batch)
    assert {s: [t.token_id for t in tokens] for s, tokens in scored.items()} == {1: [13, 14, 15], 2: [15]}
    assert ScoreRequest.for_prompt(asking, 5, 3) is None
    assert ScoreRequest.for_prompt(dataclasses.replace(asking, num_prompt_logprobs=None), 0, 6) is None
