"""Schedulers of both workers while it is not known how to draw a token, and when it turns out that it never will be."""

from __future__ import annotations

from pdserve.errors import InvalidRequestError
from pdserve.testing import decode_world, prefill_world
from pdserve.testing.decode_world import key
from pdserve.types import GenerationJob, Grammar, GrammarKind
from pdserve.worker.events import FirstToken, JobFailed

WAITS = Grammar(GrammarKind.REGEX, "waits")
FAILS = Grammar(GrammarKind.REGEX, "fails")
ERROR = InvalidRequestError("grammar.regex: is wrong", field="grammar.regex")


class Compiler:
    """Answers as `SequenceGrammars.ready` does."""

    def __init__(self) -> None:
        self.done = False

    def ready(self, job: GenerationJob) -> bool:
        """Of `WAITS` when it is done, of `FAILS` never."""
        if job.grammar == FAILS:
            raise ERROR
        return job.grammar is None or self.done


def test_a_prompt_is_computed_but_for_its_last_token_while_its_grammar_compiles() -> None:
    world, compiler = prefill_world.World(), Compiler()
    world.submit(prefill_world.job("a", 40, grammar=WAITS))
    world.reserved(key("a"))

    def step() -> list[tuple[int, int, bool]]:
        world.step = world.scheduler.plan_step(world.now, compiler.ready)
        world.settle()
        planned = [(chunk.start, chunk.length, chunk.is_last) for chunk in world.step]
        world.finish_step()
        return planned

    assert step() == [(0, 39, False)]
    assert step() == []
    compiler.done = True
    assert step() == [(39, 1, True)]
    assert any(isinstance(event, FirstToken) for event in world.of("a"))
    world.committed(key("a"))
    world.assert_empty()


def test_a_prompt_of_one_token_waits_and_lets_others_go_first() -> None:
    world, compiler = prefill_world.World(), Compiler()
    world.submit(prefill_world.job("a", 1, grammar=WAITS))
    world.submit(prefill_world.job("b", 5))
    world.reserved(key("a"))
    world.reserved(key("b"))
    world.step = world.scheduler.plan_step(world.now, compiler.ready)
    assert [chunk.key for chunk in world.step] == [key("b")]
    world.finish_step()
    world.committed(key("b"))
    world.cancel(key("a"))
    world.closed(key("a"))
    world.assert_empty()


def test_a_grammar_that_cannot_be_compiled_fails_every_branch_of_its_prompt() -> None:
    world, compiler = prefill_world.World(), Compiler()
    world.submit(prefill_world.job("a", 20, n=3, grammar=FAILS))
    world.submit(prefill_world.job("b", 20))
    world.reserved(key("a"))
    world.reserved(key("b"))
    world.step = world.scheduler.plan_step(world.now, compiler.ready)
    world.settle()
    assert [chunk.key for chunk in world.step] == [key("b")]
    world.finish_step()
    world.committed(key("b"))
    world.closed(key("a"))
    for name in ("a", "a-1", "a-2"):
        (failure,) = (event for event in world.of(name) if isinstance(event, JobFailed))
        assert (failure.code, failure.retryable, failure.blame) == ("invalid_request", False, "")
    world.assert_empty()


def test_a_mask_that_fails_in_the_last_step_of_a_prompt_takes_its_token_away() -> None:
    world = prefill_world.World()
    world.submit(prefill_world.job("a", 20))
    world.submit(prefill_world.job("b", 20))
    world.reserved(key("a"))
    world.reserved(key("b"))
    world.plan()
    world.scheduler.fail(key("a"), ERROR, world.now)
    world.finish_step()
    assert not any(isinstance(event, FirstToken) for event in world.of("a"))
    assert any(isinstance(event, FirstToken) for event in world.of("b"))
    world.closed(key("a"))
    world.committed(key("b"))
    assert [type(event) for event in world.of("a")][-1] is JobFailed
    world.assert_empty()


def test_a_sequence_has_no_part_in_a_step_while_its_grammar_compiles() -> None:
    world, compiler = decode_world.World(), Compiler()
    world.run(decode_world.job("a", grammar=WAITS))
    world.run(decode_world.job("b"))
    for expected in ([key("b")], [key("b")]):
        world.step = world.scheduler.plan_step(world.now, compiler.ready)
        assert [chunk.key for chunk in world.step] == expected
        assert world.follow() == [], "the other one may join"
        world.finish_step()
    compiler.done = True
    world.step = world.scheduler.plan_step(world.now, compiler.ready)
    assert [chunk.key for chunk in world.step] == [key("a"), key("b")]
    world.finish_step()
    assert len(world.tokens_of("a")) == 1
    world.run_steps(7)
    world.assert_empty()


def test_no_step_is_planned_ahead_of_a_token_that_decides_what_may_follow_it() -> None:
    world = decode_world.World()
    world.run(decode_world.job("a"))
    world.plan()
    assert world.follow()
    world.finish_step()
    world.finish_step()
    world.run(decode_world.job("b", grammar=WAITS))
    world.plan()
    assert world.follow() == []
    world.finish_step()
    world.run_steps(7)
    world.assert_empty()


def test_a_sequence_whose_grammar_cannot_be_compiled_fails_and_others_go_on() -> None:
    world, compiler = decode_world.World(), Compiler()
    world.run(decode_world.job("a", grammar=FAILS))
    world.run(decode_world.job("b"))
    world.step = world.scheduler.plan_step(world.now, compiler.ready)
    world.settle()
    assert [chunk.key for chunk in world.step] == [key("b")]
    (failure,) = world.of("a")
    assert isinstance(failure, JobFailed)
    assert (failure.code, failure.retryable) == ("invalid_request", False)
    assert key("a") in world.finished
    world.finish_step()
    world.run_steps(7)
    world.assert_empty()


def test_a_mask_that_fails_in_a_step_ends_its_sequence_without_the_token() -> None:
    world = decode_world.World()
    world.run(decode_world.job("a"))
    world.run(decode_world.job("b"))
    world.plan()
    world.scheduler.fail(key("a"), ERROR)
    world.finish_step()
    assert [type(event) for event in world.of("a")] == [JobFailed]
    assert len(world.tokens_of("b")) == 1
    world.scheduler.fail(key("a"), ERROR)
    world.settle()
    assert len(world.of("a")) == 1, "it is gone"
    world.run_steps(7)
    world.assert_empty()


def test_a_stop_id_under_a_grammar_ends_the_output_before_min_tokens() -> None:
    """It has been drawn because the text was complete and nothing else was allowed."""
    world = decode_world.World()
    world.run(decode_world.job("a", min_new=5, grammar=WAITS))
    world.plan()
    world.finish_step(decode_world.STOP)
    assert [event.finish_reason for event in world.tokens_of("a")] == ["stop"]
    world.assert_empty()
