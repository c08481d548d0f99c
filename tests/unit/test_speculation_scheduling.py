"""Drafts in the decode scheduler: the same outputs, with and without, whatever else happens; and no block too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.sequences import PlannedChunk
from pdserve.config import SpeculationSection
from pdserve.testing.decode_world import STOP, World, job, key
from pdserve.types import GenerationJob, TokenLogprobs

ALWAYS = SpeculationSection(method="ngram", max_draft_tokens=5, min_match_tokens=1)


def next_token(context: Sequence[int], salt: int) -> int:
    """Of a "model" that mostly goes on in circles of some tokens, leaves them now and then, and sometimes stops."""
    position = len(context)
    mixed = (position * 7919 + context[0] * 31 + salt * 104729) % 1000
    if mixed < 25:
        return STOP
    if mixed < 150:
        return mixed % 7
    return (context[-1] * 5 + salt + 1) % 7


@dataclass
class DraftingWorld(World):
    """Draws what the model says of the tokens that a step finds in the blocks."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    num_steps: int = 0

    def draw(self, chunk: PlannedChunk, token: int) -> list[int]:
        """The blocks have been written; see `World.finish_step`."""
        table = self.blocks.ids(chunk.key)
        behind = chunk.start + len(chunk.token_ids)
        context = [self.slots[table[i // 16], i % 16] for i in range(behind + len(chunk.draft))]
        places = range(behind, behind + len(chunk.draft) + 1)
        if chunk.forks:
            return [next_token(context, branch.sampling.seed) for branch in (chunk.job, *chunk.forks)]
        return [next_token(context[:place], chunk.job.sampling.seed) for place in places]

    def work(self, steps: int = 400) -> None:
        """Until nobody is there any more."""
        for _ in range(steps):
            if not self.plan():
                break
            self.num_steps += 1
            self.finish_step()
        self.assert_empty()
        assert self.scheduler.speculation._followers == {}, "nothing is kept of who has left"

    def output(self, name: str) -> list[int]:
        """What its router was told, without what came from elsewhere."""
        tokens: list[int] = []
        for event in self.tokens_of(name):
            assert event.first_index == self.tokens_of(name)[0].first_index + len(tokens), "nothing twice or left out"
            tokens += event.token_ids
        return tokens


def plain_output(j: GenerationJob, first_token: int) -> list[int]:
    """Token by token, without any worker."""
    context, output = [*j.token_ids, first_token], list[int]()
    while j.finish_reason(len(output), [first_token, *output][-1]) is None:
        output.append(next_token(context, j.sampling.seed))
        context.append(output[-1])
    return output


def test_draft_that_is_right_brings_several_tokens_in_one_event() -> None:
    w = DraftingWorld(speculation=ALWAYS)
    j = job("a", 20, max_new=60)
    w.reserve(j)
    w.commit(key("a"), 1)
    w.work()
    assert w.output("a") == plain_output(j, 1)
    events = w.tokens_of("a")
    assert w.num_steps < len(w.output("a")) and max(len(e.token_ids) for e in events) > 2
    assert sum(e.num_accepted for e in events) == len(w.output("a")) - w.num_steps
    assert sum(e.num_accepted for e in events) == w.scheduler.speculation.num_accepted
    assert sum(e.num_rejected for e in events) == w.scheduler.speculation.num_rejected
    assert {e.local_prefill_tokens for e in events} == {0}, "tokens of a draft are no prefill"


def test_first_step_has_no_draft_since_others_measure_steps_by_it() -> None:
    w = World(speculation=ALWAYS)
    j = job("a", 20, max_new=60)
    w.reserve(j)
    w.commit(key("a"), j.token_ids[3])
    (first,) = w.plan()
    assert first.draft == ()
    w.finish_step(j.token_ids[9])
    (second,) = w.plan()
    assert second.draft == j.token_ids[10:15]


def test_draft_never_goes_beyond_the_longest_output() -> None:
    for max_new in range(2, 12):
        w = DraftingWorld(speculation=ALWAYS, reserve_tokens=0, num_blocks=3)
        j = job("a", 31, max_new=max_new)
        w.reserve(j)
        w.commit(key("a"), 1)
        most = 0
        while w.plan():
            most = max(most, *(c.start + 1 + len(c.draft) for c in w.step))
            w.finish_step()
        assert most <= j.max_total_tokens - 1
        assert w.output("a") == plain_output(j, 1)
        w.assert_empty()


def test_draft_takes_no_block_that_another_sequence_may_come_to_need() -> None:
    w = DraftingWorld(speculation=ALWAYS, reserve_tokens=0, num_blocks=4)
    w.run(job("a", 14, max_new=40))
    w.run(job("b", 30, max_new=3))
    while w.plan():
        if any(chunk.key == key("b") for chunk in w.step):
            assert w.blocks.num_used + w.scheduler.num_growing <= 4 or not any(c.draft for c in w.step)
        w.finish_step()
    w.assert_empty()


def test_there_are_no_drafts_beside_prompts() -> None:
    w = DraftingWorld(speculation=ALWAYS, num_blocks=30)
    a, b = job("a", 20, max_new=40), job("b", 100, max_new=2)
    w.reserve(a)
    w.commit(key("a"), 1)
    for _ in range(4):
        w.plan()
        w.finish_step()
    w.submit(b)
    (chunk, prompt) = w.plan()
    assert prompt.is_prompt and chunk.draft == ()
    w.finish_step()
    w.work()
    assert w.output("a") == plain_output(a, 1)


def test_step_is_planned_ahead_only_where_nothing_would_be_drafted() -> None:
    w = World(speculation=ALWAYS)
    j = job("a", 20, max_new=60)
    w.reserve(j)
    w.commit(key("a"), 998)
    assert w.plan() and w.follow(), "nothing is known of the token that is drawn"
    w.finish_step(997)
    assert w.follow(), "nor of what comes after it"
    w.finish_step(j.token_ids[3])
    assert w.follow() == [], "a draft will be made of what comes after this step"
    w.finish_step(j.token_ids[4])
    (chunk,) = w.plan()
    assert chunk.draft == j.token_ids[5:10]
    assert w.follow() == [], "how far it comes is not known"
    w.finish_step(996)


def test_drafts_stop_where_they_are_never_right_and_go_on_where_they_are() -> None:
    """In the scheduler, which has to say what was drawn and how long it took."""

    def num_drafted(w: World, next_tokens: list[int]) -> int:
        total = 0
        for token in next_tokens:
            (chunk,) = w.plan()
            total += len(chunk.draft)
            w.now += 0.01 * (1 + 0.02 * len(chunk.draft))
            w.finish_step(token)
        return total

    w = World(speculation=SpeculationSection(min_match_tokens=1, max_draft_tokens=1), num_blocks=40)
    w.run(job("a", 20, max_new=500))
    misleading = [token for i in range(40) for token in (5, 500 + i)]
    assert num_drafted(w, misleading) > 0
    assert num_drafted(w, [5, 600, 5, 601, 5, 602]) == 0
    assert num_drafted(w, [5] * 30) > 0


def test_tokens_behind_a_mask_that_could_not_be_made_are_not_part_of_the_output() -> None:
    w = DraftingWorld(speculation=ALWAYS)
    j = job("a", 20, max_new=60)
    w.reserve(j)
    w.commit(key("a"), 1)
    while not (plan := w.plan()) or len(plan[0].draft) < 3:
        w.finish_step()
    (chunk,) = plan
    for i, token_id in enumerate((*chunk.token_ids, *chunk.draft)):
        w.slots[w.blocks.ids(chunk.key)[(chunk.start + i) // 16], (chunk.start + i) % 16] = token_id
    drawn = w.draw(chunk, 0)
    w.step = []
    w.scheduler.step_done(drawn, [len(drawn)], 0.1, w.now, num_meaningful={key("a"): 1})
    w.settle()
    assert len(w.tokens_of("a")[-1].token_ids) == 1
    w.work()
    assert w.output("a") == plain_output(j, 1)


def test_each_token_of_an_event_has_its_own_log_probability() -> None:
    w = DraftingWorld(speculation=ALWAYS)
    w.reserve(job("a", 20, max_new=60, num_logprobs=0))
    w.commit(key("a"), 1)
    while not (plan := w.plan()) or len(plan[0].draft) < 2:
        w.finish_step()
    (chunk,) = plan
    drawn = [*chunk.draft, 6]
    w.step = []
    w.scheduler.step_done(
        drawn, [len(drawn)], 0.1, w.now, logprobs={i: TokenLogprobs(t, -1.0 - i) for i, t in enumerate(drawn)}
    )
    w.settle()
    event = w.tokens_of("a")[-1]
    assert [entry.token_id for entry in event.logprobs] == list(event.token_ids) == drawn
    assert [entry.logprob for entry in event.logprobs] == [-1.0 - i for i in range(len(drawn))]


@pytest.mark.parametrize("n", [1, 3])
def test_outputs_of_prompts_that_are_computed_here(n: int) -> None:
    w = DraftingWorld(speculation=ALWAYS, num_blocks=40)
    j = job("a", 50, max_new=50, n=n)
    w.submit(j)
    w.work()
    for branch in j.branches:
        first = next_token(branch.token_ids, branch.sampling.seed)
        if branch.finish_reason(0, first) is None:
            assert w.output(branch.request_id) == plain_output(branch, first)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(2, 60), st.integers(0, 2)), min_size=1, max_size=5),
    st.integers(8, 14),
    st.integers(0, 40),
    st.data(),
)
def test_outputs_are_those_of_plain_decoding_whatever_else_happens(
    shapes: list[tuple[int, int, int]], num_blocks: int, reserve_tokens: int, data: st.DataObject
) -> None:
    """Prompts of a family share blocks, few blocks mean preemptions, some are cancelled, some prompts are computed
    here. `World` checks that what a step finds of a sequence are its own tokens, and that nobody writes what others
    see."""
    w = DraftingWorld(
        speculation=ALWAYS, num_blocks=num_blocks, reserve_tokens=reserve_tokens, max_batch_size=4, max_waiting=8
    )
    jobs = [
        job(f"q{i}", num_tokens, max_new=max_new, family="f" if family else None)
        for i, (num_tokens, max_new, family) in enumerate(shapes)
    ]
    firsts: dict[str, int] = {}
    cancelled = set[str]()
    waiting = list(jobs)
    for _ in range(2000):
        if waiting:
            j = waiting[0]
            if data.draw(st.booleans()):
                w.submit(j)
                firsts[j.request_id] = next_token(j.token_ids, j.sampling.seed)
                waiting.pop(0)
            elif isinstance(w.reserve(j), int):
                firsts[j.request_id] = 1
                w.commit(key(j.request_id), 1)
                waiting.pop(0)
        if not w.plan():
            if not waiting:
                break
            continue
        if not data.draw(st.integers(0, 30)):
            name = data.draw(st.sampled_from(sorted(firsts)))
            cancelled.add(name)
            w.scheduler.cancel(key(name))
            w.settle()
        w.finish_step()
    w.assert_empty()
    for j in jobs:
        first = firsts[j.request_id]
        wanted = [] if j.finish_reason(0, first) is not None else plain_output(j, first)
        output = w.output(j.request_id)
        assert output == (wanted[: len(output)] if j.request_id in cancelled else wanted)
