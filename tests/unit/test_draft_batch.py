"""A batch in which a sequence has a draft: a token is drawn at each of its places, as if it had come one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.batch import SampleRequest, SequenceChunk, build_batch
from pdserve.engine.logit_edits import SequenceEdits
from pdserve.testing.decode_world import job
from pdserve.types import SamplingParams

PENALTIES = SamplingParams(
    seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((4, 2.0),)
)


def request(seed: int) -> SampleRequest:
    return SampleRequest(params=SamplingParams(seed=seed))


def test_every_place_of_a_draft_is_drawn_with_its_own_position_between_other_sequences() -> None:
    batch = build_batch(
        [
            SequenceChunk(token_ids=(1,), start_position=9, block_table=(0,), samples=(request(1),)),
            SequenceChunk(
                token_ids=(5, 6, 7), start_position=20, block_table=(1, 2), samples=(request(2),) * 3, num_drafted=2
            ),
            SequenceChunk(token_ids=(3, 4), start_position=0, block_table=(3,), samples=(request(4), request(5))),
            SequenceChunk(token_ids=(8, 9), start_position=0, block_table=(4,)),
        ],
        16,
    )
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 5, 5]
    assert batch.sampling.positions.tolist() == [10, 21, 22, 23, 2, 2]
    assert batch.sampling.seed.tolist() == [1, 2, 2, 2, 4, 5]
    assert batch.logit_rows.dtype == np.int32


def test_draft_without_a_request_for_each_place_is_a_bug() -> None:
    chunk = SequenceChunk(
        token_ids=(5, 6, 7), start_position=0, block_table=(1,), samples=(request(2),) * 2, num_drafted=2
    )
    with pytest.raises(AssertionError, match="draft"):
        build_batch([chunk], 16)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
    st.lists(st.integers(0, 6), max_size=6),
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
)
def test_edits_ahead_are_those_of_observing_the_tokens_and_change_nothing(
    prompt: list[int], output: list[int], draft: list[int]
) -> None:
    edits = SequenceEdits(PENALTIES, prompt, output)
    ahead = edits.ahead(draft)
    assert edits.ahead(draft)[0].ids.tolist() == ahead[0].ids.tolist(), "asked again it says the same"
    for index, (token_id, row) in enumerate(zip(draft, ahead, strict=True), start=len(output)):
        edits.observe(index, token_id)
        now = edits.row()
        assert row.ids.tolist() == now.ids.tolist() and row.terms.tolist() == now.terms.tolist()


def test_requests_along_a_draft_are_those_of_each_place() -> None:
    """Stop ids are forbidden only before `min_new_tokens`, which may lie in the middle of a draft."""
    j = job("a", 4, min_new=3, max_new=20, sampling=PENALTIES, num_logprobs=2)
    edits = SequenceEdits.for_job(j)
    assert edits is not None
    edits.observe(0, 5)
    requests = SampleRequest.for_draft(j, 1, (6, 7), edits)
    assert [r.forbidden_token_ids for r in requests] == [j.stop_token_ids, j.stop_token_ids, ()]
    assert [r.num_logprobs for r in requests] == [2, 2, 2]
    plain = SampleRequest.for_job(j, 1, edits)
    assert requests[0].edits is not None and plain.edits is not None
    assert requests[0].edits.ids.tolist() == plain.edits.ids.tolist()
    assert requests[2].edits is not None and {6, 7} <= set(requests[2].edits.ids.tolist())
