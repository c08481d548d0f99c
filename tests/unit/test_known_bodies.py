"""A body whose parameters were seen before means the same as it would have meant the first time."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from pdserve.config import load_config
from pdserve.errors import PdServeError
from router.core import RouterCore
from router.http import generate
from router.http.generate import ChatEndpoint, CompletionEndpoint
from router.http.known_bodies import MAX_KNOWN
from router.http.plans import Plan
from router.validation import Limits

CONFIG = load_config(environ={}, overrides={"router.max_prompt_bytes": 4096}).router


class Core:
    """As much of a RouterCore as a check needs."""

    config = CONFIG

    def limits(self) -> Limits:
        return Limits(model="m", vocab_size=1000, max_model_len=2048)


CORE = cast("RouterCore", Core())


def chat(*contents: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for content in contents]


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "max_tokens": 7},
    {"temperature": 0.0, "max_tokens": 7},
    {"stop": ["a", "b"], "seed": 5, "n": 3, "stream": True, "stream_options": {"include_usage": True}},
    {"logit_bias": {"7": 1.5}, "stop_token_ids": [3], "ignore_eos": True, "top_k": -1, "model": "m", "priority": 2},
    {"response_format": {"type": "json_object"}, "cache_salt": "s", "min_tokens": None, "return_token_ids": True},
    {"truncate_prompt_tokens": 4, "skip_special_tokens": False, "max_draft_tokens": 0},
]
CHATS = [
    chat("one"),
    chat("be brief", role="system") + chat("two", "") + chat("three", role="assistant"),
    chat("kind", role="developer") + chat("four"),
    chat([{"type": "text", "text": "parts"}]),
    [{"role": "user", "content": "named", "name": "me"}],
    [*chat("five"), {"role": "assistant", "content": None}, *chat("six")],
    [*chat("seven"), {"role": "tool", "content": "8", "tool_call_id": "x"}],
]
TEXTS = ["one", "two\n", "\u00fcber", [1, 2, 3], ["a", "b"]]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def alike(plan: Plan) -> Plan:
    """Without what is drawn anew for each."""
    prompts = tuple(
        dataclasses.replace(checked, sampling=dataclasses.replace(checked.sampling, seed=0)) for checked in plan.prompts
    )
    return dataclasses.replace(plan, request_id="", prompts=prompts)


def seeds(plan: Plan) -> list[int]:
    return [checked.sampling.seed for checked in plan.prompts]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize(
    ("kind", "field", "prompts"), [(ChatEndpoint, "messages", CHATS), (CompletionEndpoint, "prompt", TEXTS)]
)
def test_every_body_means_what_it_means_alone(
    kind: type[ChatEndpoint] | type[CompletionEndpoint],
    field: str,
    prompts: list[Any],
    parameters: dict[str, Any],
) -> None:
    used = kind()
    for prompt in [*prompts, *reversed(prompts)]:
        value = {field: prompt, **parameters}
        plan, again, alone = used.plan(value, CORE), used.plan(value, CORE), kind().plan(value, CORE)
        assert alike(plan) == alike(again) == alike(alone)
        assert len({plan.request_id, again.request_id, alone.request_id}) == 3
        if parameters.get("seed") is None:
            assert seeds(plan) != seeds(again)
        else:
            assert seeds(plan) == seeds(again) == seeds(alone)
    assert len(used._known) == 1


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize(
    ("kind", "checks", "field", "prompts", "unusual"),
    [
        (ChatEndpoint, "chat_plan", "messages", CHATS[:3], CHATS[3]),
        (CompletionEndpoint, "completion_plan", "prompt", TEXTS[:3], TEXTS[3]),
    ],
)
def test_of_parameters_that_were_seen_only_the_prompt_is_looked_at(
    kind: type[ChatEndpoint] | type[CompletionEndpoint],
    checks: str,
    field: str,
    prompts: list[Any],
    unusual: Any,
    parameters: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_checked = 0
    general = getattr(generate, checks)

    def count(body: Any, core: RouterCore) -> Plan:
        nonlocal num_checked
        num_checked += 1
        plan: Plan = general(body, core)
        return plan

    monkeypatch.setattr(generate, checks, count)
    used = kind()
    for prompt in prompts * 3:
        used.plan({field: prompt, **parameters}, CORE)
    assert num_checked == 1
    used.plan({field: unusual, **parameters}, CORE)
    assert num_checked == 2, "another kind of prompt goes the general way"
    used.plan({field: prompts[0], **parameters, "seed": 77}, CORE)
    assert num_checked == 3, "so do other parameters"


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (ChatEndpoint, {"messages": chat("x")}, {"messages": chat(" ")}),
        (ChatEndpoint, {"messages": chat("x")}, {"messages": chat("x", role="nobody")}),
        (ChatEndpoint, {"messages": chat("x")}, {"messages": []}),
        (ChatEndpoint, {"messages": chat("x")}, {"messages": chat("\ud800")}),
        (ChatEndpoint, {"messages": chat("x")}, {"messages": chat("x" * (CONFIG.max_prompt_bytes + 1))}),
        (CompletionEndpoint, {"prompt": "x"}, {"prompt": "\ud800"}),
        (CompletionEndpoint, {"prompt": "x"}, {"prompt": 7}),
        (CompletionEndpoint, {"prompt": "x"}, {"prompt": "x" * (CONFIG.max_prompt_bytes + 1)}),
        (CompletionEndpoint, {"prompt": "x", "max_tokens": 1}, {"prompt": "x", "max_tokens": True}),
        (CompletionEndpoint, {"prompt": "x", "top_p": 1}, {"prompt": "x", "top_p": "1"}),
        (CompletionEndpoint, {"prompt": "x", "n": 2}, {"prompt": "x", "n": 2.0}),
        # What goes together with the prompt.
        (
            ChatEndpoint,
            {"messages": [*chat("x"), {"role": "assistant", "content": "y"}], "continue_final_message": True},
            {"messages": [*chat("x"), {"role": "assistant", "content": ""}], "continue_final_message": True},
        ),
        (
            ChatEndpoint,
            {"messages": chat("x"), "tools": TOOLS},
            {"messages": chat("x" * (CONFIG.max_prompt_bytes - 10)), "tools": TOOLS},
        ),
    ],
)
def test_what_is_wrong_is_still_refused_in_the_same_words(
    kind: type[ChatEndpoint] | type[CompletionEndpoint], good: dict[str, Any], bad: dict[str, Any]
) -> None:
    used = kind()
    used.plan(good, CORE)
    with pytest.raises(PdServeError) as alone:
        kind().plan(bad, CORE)
    with pytest.raises(PdServeError) as after:
        used.plan(bad, CORE)
    assert (after.value.code, after.value.message, after.value.field) == (
        alone.value.code,
        alone.value.message,
        alone.value.field,
    )


def test_a_name_of_the_client_stays_its_name() -> None:
    used = CompletionEndpoint()
    for _ in range(2):
        assert used.plan({"prompt": "x", "request_id": "mine"}, CORE).request_id == "mine"


def test_what_is_remembered_has_a_bound_and_no_prompt_in_it() -> None:
    used = CompletionEndpoint()
    for number in range(MAX_KNOWN + 10):
        used.plan({"prompt": "secret", "seed": number}, CORE)
    used.plan({"prompt": "secret", "stop": ["s" * 4000], "guided_regex": "a" * 200}, CORE)
    assert len(used._known) == MAX_KNOWN
    assert "secret" not in repr(used._known._known)


def test_an_unknown_field_is_logged_each_time(caplog: pytest.LogCaptureFixture) -> None:
    used = CompletionEndpoint()
    with caplog.at_level("INFO"):
        for _ in range(2):
            used.plan({"prompt": "x", "novelty": 1}, CORE)
    assert sum("novelty" in record.message for record in caplog.records) == 2
