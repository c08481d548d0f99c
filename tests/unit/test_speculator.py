"""How many tokens are drafted: as many as are worth it, by what they have cost and how often they were right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.sequences import PlannedChunk, Sequence
from decode_worker.speculation.acceptance import PRIOR, Acceptance
from decode_worker.speculation.costs import FORGET_AFTER, StepCosts
from decode_worker.speculation.model_policy import GIVES_UP, TRY_AGAIN
from decode_worker.speculation.outcome import outcome
from decode_worker.speculation.speculator import Candidate, Speculator
from pdserve.block_hash import BlockHasher
from pdserve.config import SpeculationSection
from pdserve.testing.decode_world import STOP, job, key
from pdserve.types import FinishReason

LOOP = [1, 2, 3, 4, 5]
STEP_S = 0.01


def sequence_of(name: str, tokens: list[int]) -> Sequence:
    hashes = BlockHasher(model_fingerprint="m", block_size=16).chain()
    return Sequence(
        job=job(name, 1, max_new=1000), handoff=key(name), hashes=hashes, num_held=0, tokens=tokens, num_computed=100
    )


def drafts(speculator: Speculator, *sequences: Sequence, room: int = 100) -> list[tuple[int, ...]]:
    return speculator.drafts([Candidate(sequence, room) for sequence in sequences])


def run(speculator: Speculator, sequence: Sequence, next_tokens: list[int], step_s: float = STEP_S) -> int:
    """Steps that draw `next_tokens` one by one, each with whatever is drafted; gives the number of drafted tokens."""
    total = 0
    for token in next_tokens:
        (draft,) = drafts(speculator, sequence)
        total += len(draft)
        sequence.tokens.append(token)
        speculator.drawn(sequence, (token,))
        speculator.stepped([sequence], len(draft), step_s * (1 + len(draft) * 0.02))
    return total


def test_method_off_drafts_nothing_and_ngram_whatever_was_there_before() -> None:
    sequence = sequence_of("a", [*LOOP, *LOOP])
    assert drafts(Speculator(SpeculationSection(method="off")), sequence) == [()]
    always = Speculator(SpeculationSection(method="ngram", max_draft_tokens=4))
    assert drafts(always, sequence) == [(1, 2, 3, 4)]
    assert drafts(always, sequence, room=2) == [(1, 2)]
    assert drafts(always, sequence, room=0) == [()]
    assert drafts(always, sequence_of("b", [7, 8, 9])) == [()]


def test_draft_ends_before_a_token_that_ends_the_output() -> None:
    sequence = sequence_of("a", [1, 2, 3, STOP, 5, 1, 2])
    assert drafts(Speculator(SpeculationSection(method="ngram")), sequence) == [(3,)]


def test_more_sequences_than_allowed_have_no_drafts() -> None:
    speculator = Speculator(SpeculationSection(method="ngram", max_batch_size=2, max_draft_tokens=1))
    sequences = [sequence_of(name, [*LOOP, *LOOP]) for name in "abc"]
    assert drafts(speculator, *sequences[:2]) == [(1,), (1,)]
    assert drafts(speculator, *sequences) == [(), (), ()]


def test_nothing_is_drafted_before_a_plain_step_was_measured() -> None:
    speculator = Speculator(SpeculationSection())
    sequence = sequence_of("a", [*LOOP, *LOOP])
    assert drafts(speculator, sequence) == [()]
    speculator.stepped([sequence], 0, STEP_S)
    assert len(drafts(speculator, sequence)[0]) > 0


def test_predictions_that_fail_switch_drafts_off_and_come_back_by_being_right_without_a_draft() -> None:
    speculator = Speculator(SpeculationSection(max_draft_tokens=4))
    # Pairs come again, and what follows them is new each time.
    misleading = [token for i in range(60) for token in (1, 2, 100 + i)]
    sequence = sequence_of("a", [1, 2, 50])
    run(speculator, sequence, misleading)
    assert run(speculator, sequence, [1, 2, 500, 1, 2, 501]) == 0
    copied = run(speculator, sequence, LOOP * 12)
    assert copied > 0


def test_tokens_that_cost_a_whole_pass_more_are_left_out() -> None:
    speculator = Speculator(SpeculationSection(max_draft_tokens=7))
    sequence = sequence_of("a", LOOP * 10)
    for _ in range(20):
        for number in range(8):
            # Four tokens for the price of one; then another pass, which takes three times as long.
            speculator.stepped([sequence], number, STEP_S if number < 4 else 3 * STEP_S)
    assert len(drafts(speculator, sequence)[0]) == 3


def test_nothing_is_drafted_where_each_token_costs_as_much_as_a_step() -> None:
    speculator = Speculator(SpeculationSection(max_draft_tokens=3))
    sequence = sequence_of("a", LOOP * 10)
    for _ in range(20):
        for number in range(4):
            speculator.stepped([sequence], number, STEP_S * (1 + number))
    assert drafts(speculator, sequence) == [()]


def test_sequence_with_the_better_chances_gets_the_tokens() -> None:
    speculator = Speculator(SpeculationSection(max_draft_tokens=3))
    good, bad = sequence_of("good", LOOP * 4), sequence_of("bad", [1, 2, 50])
    run(speculator, bad, [token for i in range(40) for token in (1, 2, 100 + i)])
    run(speculator, good, LOOP * 4)
    bad.tokens.extend((1, 2))
    for _ in range(20):
        for number in range(7):
            speculator.stepped([good, bad], number, STEP_S if number < 4 else 3 * STEP_S)
    assert [len(draft) for draft in drafts(speculator, good, bad)] == [3, 0]


def test_forgotten_sequence_begins_anew() -> None:
    speculator = Speculator(SpeculationSection(method="ngram", max_draft_tokens=1))
    assert drafts(speculator, sequence_of("a", [*LOOP, *LOOP])) == [(1,)]
    speculator.forget(key("a"))
    assert drafts(speculator, sequence_of("a", [6, 7, 6, 7])) == [(6,)]


def test_draft_model_has_the_time_it_needs_to_catch_up_before_it_is_tried() -> None:
    speculator = Speculator(SpeculationSection(draft_model="a small one"))
    sequence = sequence_of("a", [7, 8, 9])
    for _ in range(TRY_AGAIN):
        speculator.stepped([sequence], 0, STEP_S)
    for _ in range(200):
        assert speculator.model_keeps_up
        speculator.disturbed()
        speculator.stepped([sequence], 0, STEP_S)
    for _ in range(GIVES_UP - TRY_AGAIN):
        assert speculator.model_keeps_up
        speculator.stepped([sequence], 0, STEP_S)
    assert not speculator.model_keeps_up, "there is nothing to catch up with, and no draft"


def test_measurement_of_a_bad_moment_is_made_again_some_day() -> None:
    costs = StepCosts()
    costs.note(1, 100, 0, STEP_S)
    costs.note(1, 100, 1, 100 * STEP_S)
    bad = costs.ratio(1, 100, 1)
    assert bad is not None and 2.0 < bad < 4.0, "what is out of all proportion counts for less"
    for _ in range(FORGET_AFTER + 1):
        costs.note(1, 100, 0, STEP_S)
    again = costs.ratio(1, 100, 1)
    assert again is not None and again < 1.2


def test_costs_of_one_batch_size_and_length_say_nothing_of_others() -> None:
    costs = StepCosts()
    costs.note(1, 100, 0, STEP_S)
    assert costs.ratio(2, 100, 1) is None and costs.ratio(1, 5000, 1) is None


def test_chances_follow_what_was_seen_and_fall_along_a_draft() -> None:
    others = Acceptance(memory=100.0)
    assert others.chance(2) == PRIOR
    for i in range(300):
        others.note(2, right=i % 4 == 0)
        others.note(5, right=True)
    assert others.chance(2) == pytest.approx(0.25, abs=0.03) and others.chance(5) > 0.95
    own = Acceptance(others, memory=10.0)
    assert own.chance(2) == others.chance(2), "a sequence begins with what is known of all"
    for _ in range(20):
        own.note(2, right=True)
    assert own.chance(2) > 0.7
    chances = own.chances(2, 6)
    assert chances == sorted(chances, reverse=True)


def chunk_of(draft: tuple[int, ...], max_new: int = 100) -> PlannedChunk:
    return PlannedChunk(
        key=key("a"), job=job("a", max_new=max_new), token_ids=(0,), start=20, output_index=1, draws=True, draft=draft
    )


def test_tokens_count_up_to_the_first_that_was_not_drafted() -> None:
    assert outcome(chunk_of(()), [5]) == ((5,), None)
    assert outcome(chunk_of((5, 6, 7)), [5, 6, 7, 8]) == ((5, 6, 7, 8), None)
    assert outcome(chunk_of((5, 6, 7)), [5, 9, 7, 8]) == ((5, 9), None)
    assert outcome(chunk_of((5, 6, 7)), [4, 6, 7, 8]) == ((4,), None)


def test_nothing_counts_behind_the_end_of_the_output() -> None:
    assert outcome(chunk_of((5, 6, 7)), [5, STOP, 7, 8]) == ((5, STOP), FinishReason.STOP)
    assert outcome(chunk_of((5, 6), max_new=3), [5, 6, 7]) == ((5, 6), FinishReason.LENGTH)


def test_tokens_drawn_from_a_mask_that_is_not_known_do_not_count() -> None:
    assert outcome(chunk_of((5, 6, 7)), [5, 6, 7, 8], 2) == ((5, 6), None)


@given(st.lists(st.integers(0, 2), max_size=6), st.data())
def test_outcome_is_what_drawing_one_by_one_gives(draft: list[int], data: st.DataObject) -> None:
    """The token drawn at a place depends on the tokens before it."""
    table = data.draw(st.dictionaries(st.integers(0, 400), st.integers(0, 2)))

    def drawn_after(tokens: tuple[int, ...]) -> int:
        return table.get(hash(tokens) % 400, 0)

    rows = [drawn_after(tuple(draft[:i])) for i in range(len(draft) + 1)]
    kept, _ = outcome(chunk_of(tuple(draft)), rows)
    plain: tuple[int, ...] = ()
    for _ in kept:
        plain = (*plain, drawn_after(plain))
    assert kept == plain
