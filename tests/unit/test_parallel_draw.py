"""What ranks draw together from their parts of the logits is what one rank draws from all of them, to the token."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pdserve.engine.batch import SampleRequest, SamplingBatch, SequenceChunk, build_batch
from pdserve.engine.logit_edits import SequenceEdits
from pdserve.engine.logprobs import raw_logprobs
from pdserve.engine.parallel.collectives import Collectives
from pdserve.engine.parallel.draw import Vocabulary, decide, propose, sampling_of_part, whole_rows
from pdserve.engine.parallel.partition import Span
from pdserve.engine.parallel.scores import merge_scores, propose_scores
from pdserve.engine.sampler import constrain, sample
from pdserve.testing.rank_threads import thread_collectives
from pdserve.types import SamplingParams

SPANS: dict[int, tuple[Span, ...]] = {
    2: ((0, 480), (480, 1000)),
    3: ((0, 320), (320, 640), (640, 1000)),
    # Parts so small that all of a rank's tokens are proposed.
    4: ((0, 32), (32, 64), (64, 96), (96, 101)),
}


def on_ranks(size: int, work: Callable[[int, Collectives], list[torch.Tensor]]) -> list[torch.Tensor]:
    """What `work` gives on rank 0."""
    ranks = thread_collectives(size)
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(work, rank, ranks[rank]) for rank in range(size)]
        results = [future.result() for future in futures]
    assert all(result == [] for result in results[1:]), "only rank 0 gets anything"
    return results[0]


def draw_on_ranks(
    logits: torch.Tensor, sampling: SamplingBatch, spans: tuple[Span, ...]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Tokens, and which rows took their whole logits."""
    longest = max(end - begin for begin, end in spans)
    masks = sampling.masks() if len(sampling.masked_rows) else np.empty((0, 0), np.uint32)

    def vocabulary(rank: int) -> Vocabulary:
        return Vocabulary(size=logits.shape[1], span=spans[rank], longest=longest)

    parts = [logits[:, begin:end].clone() for begin, end in spans]

    def work(rank: int, collectives: Collectives) -> list[torch.Tensor]:
        constrain(parts[rank], sampling_of_part(sampling, spans[rank], masks))
        return propose(parts[rank], sampling, vocabulary(rank), collectives)

    tokens, undecided = decide(on_ranks(len(spans), work), sampling, vocabulary(0))
    if undecided.any():
        whole = torch.cat(parts, dim=1)[torch.from_numpy(np.flatnonzero(undecided))]
        tokens[undecided] = sample(whole, whole_rows(sampling, undecided))
    return tokens, undecided


def requests(rng: np.random.Generator, vocab_size: int, num_rows: int) -> SamplingBatch:
    """Rows of every kind: greedy or not, with any filters, penalties, bans and masks."""
    chunks = []
    for row in range(num_rows):
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])),
            top_k=int(rng.choice([0, 0, 1, 5, 200, 300, 900])),
            top_p=float(rng.choice([1.0, 1.0, 0.99, 0.5, 0.01])),
            min_p=float(rng.choice([0.0, 0.0, 0.1])),
            seed=int(rng.integers(2**63)),
            frequency_penalty=float(rng.choice([0.0, 1.5])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            logit_bias=((int(rng.integers(vocab_size)), 3.0),) if rng.random() < 0.3 else (),
        )
        seen = rng.integers(0, vocab_size, 40).tolist()
        edits = SequenceEdits(params, seen[:20], seen[20:]).row() if params.edits_logits else None
        request = SampleRequest(
            params=params,
            forbidden_token_ids=tuple(rng.integers(0, vocab_size, 2).tolist()),
            edits=edits,
            allowed=_mask(rng, vocab_size) if rng.random() < 0.3 else None,
        )
        chunks.append(SequenceChunk(token_ids=[0], start_position=row, block_table=[0], samples=(request,)))
    return build_batch(chunks, 1 << 20).sampling


def _mask(rng: np.random.Generator, vocab_size: int) -> Callable[[], npt.NDArray[np.uint32]]:
    allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    # Often of one part alone, so that others have nothing to propose.
    begin = int(rng.integers(vocab_size - 8))
    allowed[begin : begin + int(rng.choice([1, 8]))] = True
    words = np.packbits(allowed, bitorder="little").view(np.uint32)
    return lambda: words


@pytest.mark.parametrize("size", SPANS)
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_requests_draws_the_tokens_of_one_rank(size: int, seed: int) -> None:
    rng = np.random.default_rng(100 * size + seed)
    vocab_size = SPANS[size][-1][1]
    sampling = requests(rng, vocab_size, 40)
    # Few different values, so that there are ties everywhere: at the top, and at the border of top-k.
    values = rng.normal(0, 2, (40, vocab_size))
    logits = torch.from_numpy((np.round(values * 4) / 4 if seed % 2 else values).astype(np.float32))
    wanted = sample(logits.clone(), sampling)
    tokens, _ = draw_on_ranks(logits, sampling, SPANS[size])
    assert tokens.tolist() == wanted.tolist()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=20)])
def test_ordinary_requests_need_no_whole_logits(params: SamplingParams) -> None:
    rng = np.random.default_rng(1)
    chunks = [
        SequenceChunk(
            token_ids=[0], start_position=i, block_table=[0], samples=(SampleRequest(params=replace(params, seed=i)),)
        )
        for i in range(8)
    ]
    sampling = build_batch(chunks, 1 << 20).sampling
    logits = torch.from_numpy(rng.normal(0, 3, (8, 1000)).astype(np.float32))
    wanted = sample(logits.clone(), sampling)
    tokens, undecided = draw_on_ranks(logits, sampling, SPANS[2])
    assert tokens.tolist() == wanted.tolist()
    assert not undecided.any()


@pytest.mark.parametrize("size", SPANS)
def test_log_probabilities_are_those_of_one_rank(size: int) -> None:
    rng = np.random.default_rng(size)
    spans, num_rows, num_top = SPANS[size], 5, 20
    vocab_size = spans[-1][1]
    logits = torch.from_numpy(rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32))
    targets = rng.integers(0, vocab_size, num_rows)
    wanted = raw_logprobs([logits], targets, num_top, torch.device("cpu"))

    def work(rank: int, collectives: Collectives) -> list[torch.Tensor]:
        begin, end = spans[rank]
        return propose_scores(logits[:, begin:end], targets, num_top, begin, collectives)

    found = merge_scores(on_ranks(size, work), targets, num_top)
    assert np.array_equal(found.top_ids, wanted.top_ids)
    assert np.array_equal(found.token_ids, targets)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-6)
    np.testing.assert_allclose(found.top_logprobs, wanted.top_logprobs, atol=2e-6)
