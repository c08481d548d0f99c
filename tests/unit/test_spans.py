"""What is told of a request that has ended before its prompt was resolved, and of one with every default."""

from __future__ import annotations

import pytest

from pdserve.lifecycle import RequestState
from pdserve.telemetry.context import new_trace
from pdserve.types import SamplingParams
from router.spans import spans_of
from router.story import Asked, Moment, Story
from router.timeline import Timeline


def story_of(asked: Asked) -> Story:
    return Story(
        request_id="x", tenant=b"", state=RequestState.FAILED, error_code="invalid_request", ended_at=2.0,
        ended_unix=3.0, phases=Timeline(1.0).phases(2.0, complete=False),
        moments=(Moment(at=1.0, name="received", attempt=1),), num_prompt_tokens=0, num_cached_tokens=0,
        num_output_tokens=0, num_attempts=0, num_migrations=0, prefill_worker="", decode_worker="", transport="",
        kv_bytes=0, asked=asked, span=new_trace(sampled=True),
    )  # fmt: skip


@pytest.mark.parametrize(("chat", "operation"), [(True, "chat"), (False, "text_completion")])
def test_of_a_request_that_was_never_resolved_only_its_kind_is_told(chat: bool, operation: str) -> None:
    root = next(iter(spans_of(story_of(Asked(chat=chat)), "m")))
    assert root.name == f"{operation} m"
    assert root.attributes["gen_ai.operation.name"] == operation
    assert {name for name in root.attributes if "request." in name} == {
        "gen_ai.request.model",
        "pdserve.request.state",
    }


def test_settings_that_change_nothing_are_not_told_but_a_temperature_of_0_is() -> None:
    asked = Asked().resolved(SamplingParams(temperature=0.0, seed=5, logit_bias=((1, 2.0),)), 9)
    attributes = next(iter(spans_of(story_of(asked), "m"))).attributes
    assert {name: value for name, value in attributes.items() if name.startswith("gen_ai.request.")} == {
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 5,
    }
