"""Every field of a public request: what passes, what is refused, and what the error names."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config.schema import RouterSection
from pdserve.errors import InvalidRequestError, NotFoundError, PromptTooLongError
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from router.validation import (
    ChatInput,
    CheckedRequest,
    GenerationSpec,
    Limits,
    check_name,
    check_request,
    check_request_id,
    check_token_ids,
    resolve,
)

NAN, INF = float("nan"), float("inf")
VOCAB = 400
EOS_IDS = (1, 2)
LIMITS = Limits(model="tiny", vocab_size=VOCAB, max_model_len=64)
CONFIG = RouterSection(max_prompt_bytes=1000, max_stop_strings=3, default_max_tokens=20)


def check(limits: Limits = LIMITS, **fields: Any) -> CheckedRequest:
    if not {"text", "chat", "token_ids"} & fields.keys():
        fields["text"] = "hello"
    return check_request(pb.GenerateRequest(**fields), limits, CONFIG)


def lengths(num_prompt: int, limits: Limits = LIMITS, config: RouterSection = CONFIG, **stop: Any) -> GenerationSpec:
    checked = check(limits, stop=common_pb2.StopParams(**stop))
    return resolve(checked, [5] * num_prompt, eos_token_ids=EOS_IDS, limits=limits, config=config)


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0, -1e-9, 3e38, 100.5])
def test_temperature_outside_its_range_is_refused(value: float) -> None:
    """O-VAL-4."""
    with pytest.raises(InvalidRequestError, match=r"sampling\.temperature: must be between 0 and 100, got") as caught:
        check(sampling=common_pb2.SamplingParams(temperature=value))
    assert caught.value.field == "sampling.temperature"


def test_nan_is_called_nan() -> None:
    """O-VAL-4."""
    with pytest.raises(InvalidRequestError, match=r"^sampling\.temperature: must be between 0 and 100, got NaN$"):
        check(sampling=common_pb2.SamplingParams(temperature=NAN))


@pytest.mark.parametrize("value", [0.0, 1e-12, 1e-4, 1.0, 2.0, 100.0])
def test_tiny_and_ordinary_temperatures_pass(value: float) -> None:
    """O-VAL-4."""
    temperature = check(sampling=common_pb2.SamplingParams(temperature=value)).sampling.temperature
    assert temperature == pytest.approx(value, rel=1e-6)
    assert (temperature == 0) is (value == 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("top_p", value) for value in (NAN, INF, -INF, -1.0, 0.0, 1.0001, 3e38)],
        *[("min_p", value) for value in (NAN, INF, -INF, -0.1, 1.0001, 3e38)],
        *[("top_k", value) for value in (-1, VOCAB + 1, 2**31 - 1, -(2**31))],
    ],
)
def test_other_sampling_values_outside_their_range_are_refused(field: str, value: float) -> None:
    """O-VAL-4."""
    with pytest.raises(InvalidRequestError, match=rf"^sampling\.{field}: must be "):
        check(sampling=common_pb2.SamplingParams(**{field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("top_p", 1.0), ("top_p", 1e-6), ("min_p", 0.0), ("min_p", 1.0), ("top_k", VOCAB)]
)
def test_limits_of_sampling_values_pass(field: str, value: float) -> None:
    check(sampling=common_pb2.SamplingParams(**{field: value}))  # type: ignore[arg-type]


def test_defaults_of_sampling_are_resolved_and_seeds_differ() -> None:
    first, second = check().sampling, check().sampling
    assert (first.temperature, first.top_k, first.top_p, first.min_p) == (1.0, 0, 1.0, 0.0)
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**64
    assert check(sampling=common_pb2.SamplingParams(seed=0)).sampling.seed == 0


@pytest.mark.parametrize(
    ("stop", "field"),
    [
        ({"max_tokens": 0}, "stop.max_tokens"),
        ({"max_tokens": -1}, "stop.max_tokens"),
        ({"max_tokens": 65}, "stop.max_tokens"),
        ({"max_tokens": 2**31 - 1}, "stop.max_tokens"),
        ({"min_tokens": -1}, "stop.min_tokens"),
        ({"min_tokens": 65}, "stop.min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "stop.min_tokens"),
        ({"stop_token_ids": [VOCAB]}, "stop.stop_token_ids[0]"),
        ({"stop_token_ids": [5, -1]}, "stop.stop_token_ids[1]"),
        ({"stop_token_ids": [5] * 257}, "stop.stop_token_ids"),
        ({"stop": ["a", ""]}, "stop.stop[1]"),
        ({"stop": ["a", "b", "c", "d"]}, "stop.stop"),
        ({"stop": ["a" * 4097]}, "stop.stop"),
    ],
)
def test_stop_values_outside_their_range_are_refused(stop: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(stop=common_pb2.StopParams(**stop))
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="robot", content="x")]),
            sampling=common_pb2.SamplingParams(temperature=-1, top_p=2),
            stop=common_pb2.StopParams(max_tokens=0, stop=[""]),
        )
    for field in ("chat.messages[0].role", "sampling.temperature", "sampling.top_p", "stop.max_tokens", "stop.stop[0]"):
        assert f"{field}: " in caught.value.message
    assert caught.value.field == "chat.messages[0].role"


def test_many_problems_do_not_make_an_endless_message() -> None:
    with pytest.raises(InvalidRequestError, match=r"and 44 more$"):
        check(token_ids=pb.TokenIds(ids=[-1] * 64))


@pytest.mark.parametrize("token_id", [VOCAB, -1, 4294967295, 2**63 - 1])
def test_a_token_outside_the_vocabulary_is_named(token_id: int) -> None:
    """O-VAL-3."""
    with pytest.raises(InvalidRequestError, match=rf"^token_ids\.ids\[1\]: .* got {token_id}$"):
        check(token_ids=pb.TokenIds(ids=[5, token_id]))
    with pytest.raises(InvalidRequestError, match=rf"^token_ids\[0\]: .* got {token_id}$"):
        check_token_ids("token_ids", [token_id], VOCAB, 10)
    check(token_ids=pb.TokenIds(ids=[0, VOCAB - 1]))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "x" * 1001}, "text"),
        ({"text": "é" * 501}, "text"),
        ({"chat": pb.ChatPrompt()}, "chat.messages"),
        ({"chat": pb.ChatPrompt(messages=[pb.ChatMessage(content="x")])}, "chat.messages[0].role"),
        ({"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 600)] * 2)}, "chat.messages"),
    ],
)
def test_prompts_that_no_one_should_tokenize_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(**fields)
    assert caught.value.field == field


def test_a_request_without_input_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"^input: set one of text, token_ids and chat$"):
        check_request(pb.GenerateRequest(), LIMITS, CONFIG)


def test_nul_characters_are_text() -> None:
    check(text="a\0b")


def test_another_model_is_not_found_and_its_name_is_cut() -> None:
    check(model="tiny")
    check(model="")
    with pytest.raises(NotFoundError) as caught:
        check(model="x" * 10_000)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("name", ["a", "A-b_c.d:e", "0" * 128])
def test_good_names_pass(name: str) -> None:
    assert check_request_id(name) == name


@pytest.mark.parametrize("name", ["a b", "a\n", "é", "a" * 129, "a/b", "~"])
def test_malformed_names_are_refused(name: str) -> None:
    """O-RTR-4."""
    with pytest.raises(InvalidRequestError) as caught:
        check_request_id(name)
    assert caught.value.field == "request_id"


def test_a_missing_name_is_made() -> None:
    names = {check_request_id("") for _ in range(100)}
    assert len(names) == 100
    assert all(check_request_id(name) == name for name in names)


@pytest.mark.parametrize(
    ("num_prompt", "given", "granted"),
    [(63, 1, 1), (63, None, 1), (40, 24, 24), (40, None, 20), (50, None, 14), (1, None, 20)],
)
def test_what_fits_the_context_is_granted(num_prompt: int, given: int | None, granted: int) -> None:
    """O-VAL-2, O-VAL-5."""
    stop = {} if given is None else {"max_tokens": given}
    assert lengths(num_prompt, **stop).max_tokens == granted


@pytest.mark.parametrize(
    ("num_prompt", "stop", "field"),
    [
        (64, {}, "text"),
        (65, {}, "text"),
        (64, {"max_tokens": 1}, "text"),
        (40, {"max_tokens": 25}, "stop.max_tokens"),
        (60, {"min_tokens": 5}, "stop.min_tokens"),
    ],
)
def test_what_does_not_fit_the_context_is_refused(num_prompt: int, stop: dict[str, int], field: str) -> None:
    """O-VAL-2."""
    with pytest.raises(PromptTooLongError) as caught:
        lengths(num_prompt, **stop)
    assert caught.value.field == field


def test_an_empty_prompt_is_refused() -> None:
    """O-VAL-1."""
    with pytest.raises(InvalidRequestError, match=r"^text: the prompt is empty$"):
        lengths(0)


def chat(*turns: tuple[str, str]) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


@pytest.mark.parametrize(
    ("turns", "field"),
    [
        ([("user", "")], "chat.messages[0].content"),
        ([("user", " \n\t")], "chat.messages[0].content"),
        ([("system", "Be brief."), ("user", "")], "chat.messages[1].content"),
        ([("user", ""), ("assistant", "Yes?"), ("user", " ")], "chat.messages[2].content"),
        ([("system", " ")], "chat.messages[0].content"),
    ],
)
def test_a_chat_in_which_nobody_says_anything_is_refused(turns: list[tuple[str, str]], field: str) -> None:
    """O-VAL-1."""
    with pytest.raises(InvalidRequestError, match=r": is empty$") as caught:
        check(chat=chat(*turns))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "turns",
    [
        [("user", "Hi"), ("assistant", ""), ("user", "Still there?")],
        [("user", "Hi"), ("assistant", "Yes?"), ("user", "")],
        [("system", "Be brief.")],
    ],
)
def test_an_empty_turn_beside_others_is_legal(turns: list[tuple[str, str]]) -> None:
    """O-VAL-1."""
    assert check(chat=chat(*turns)).prompt


def test_the_default_output_is_at_least_min_tokens() -> None:
    spec = lengths(10, min_tokens=30)
    assert (spec.min_tokens, spec.max_tokens) == (30, 30)


@pytest.mark.parametrize(
    ("limits", "num_prompt", "stop", "words"),
    [
        ({"prefill_tokens": 31}, 32, {}, "largest prefill worker"),
        ({"decode_tokens": 48}, 48, {}, "largest decode worker"),
        ({"decode_tokens": 48}, 40, {"max_tokens": 9}, "largest decode worker"),
    ],
)
def test_what_fits_no_pool_is_refused(
    limits: dict[str, int], num_prompt: int, stop: dict[str, int], words: str
) -> None:
    """O-VAL-6."""
    small = Limits(model="tiny", vocab_size=VOCAB, max_model_len=64, **limits)
    with pytest.raises(PromptTooLongError, match=words):
        lengths(num_prompt, small, **stop)


def test_what_just_fits_the_pools_is_granted() -> None:
    """O-VAL-6."""
    small = Limits(model="tiny", vocab_size=VOCAB, max_model_len=64, prefill_tokens=32, decode_tokens=48)
    assert lengths(32, small, max_tokens=16).max_tokens == 16
    assert lengths(32, small).max_tokens == 16


def test_ending_tokens_are_the_models_and_the_clients() -> None:
    """O-SAM-1."""
    assert lengths(5).stop_token_ids == (1, 2)
    assert lengths(5, stop_token_ids=[9, 2, 9]).stop_token_ids == (1, 2, 9)
    assert lengths(5, stop_token_ids=[9], ignore_eos=True).stop_token_ids == (9,)
    assert lengths(5, ignore_eos=True).stop_token_ids == ()
    assert lengths(5, stop=["a", "b", "a"]).stop_strings == ("a", "b")


def test_what_is_left_out_is_one_output_of_ordinary_priority_without_special_tokens() -> None:
    checked = check()
    assert (checked.num_outputs, checked.priority, checked.cache_salt) == (1, 0, "")
    assert (checked.skip_special_tokens, checked.include_stop_string) == (True, False)
    given = check(n=3, priority=-100, cache_salt="s", skip_special_tokens=False, include_stop_string=True)
    assert (given.num_outputs, given.priority, given.cache_salt) == (3, -100, "s")
    assert (given.skip_special_tokens, given.include_stop_string) == (False, True)


def test_all_that_is_out_of_range_is_in_one_error() -> None:
    """O-VAL-2."""
    with pytest.raises(InvalidRequestError) as caught:
        check(n=0, priority=101, cache_salt="s" * 129)
    assert caught.value.message == (
        "n: must be between 1 and 128, got 0; cache_salt: at most 128 characters, got 129; "
        "priority: must be between -100 and 100, got 101"
    )


def test_variables_of_the_template_come_through_unless_the_request_itself_sets_them() -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])
    chat.template_kwargs.update({"enable_thinking": False, "names": ["a", {"b": 1.5}]})
    prompt = check(chat=chat).prompt
    assert isinstance(prompt, ChatInput)
    assert prompt.template_kwargs == {"enable_thinking": False, "names": ["a", {"b": 1.5}]}
    assert prompt.add_generation_prompt
    chat.add_generation_prompt = False
    chat.template_kwargs.update({"messages": []})
    with pytest.raises(InvalidRequestError) as caught:
        check(chat=chat)
    assert caught.value.field == "chat.template_kwargs.messages"
    chat.template_kwargs.Clear()
    quiet = check(chat=chat).prompt
    assert isinstance(quiet, ChatInput)
    assert not quiet.add_generation_prompt


@pytest.mark.parametrize("value", [NAN, INF])
def test_variables_of_the_template_are_values_that_json_has(value: float) -> None:
    """O-VAL-4."""
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])
    chat.template_kwargs.update({"x": value})
    with pytest.raises(InvalidRequestError) as caught:
        check(chat=chat)
    assert caught.value.field == "chat.template_kwargs"


def test_the_names_of_outputs_are_names_as_well() -> None:
    assert check_name("x" * 128, 1) == "x" * 128
    assert check_name("x" * 126, 10) == "x" * 126
    assert check_name("", 128).startswith("req-")
    for length, num_outputs in ((127, 10), (126, 11), (129, 1)):
        with pytest.raises(InvalidRequestError) as caught:
            check_name("x" * length, num_outputs)
        assert caught.value.field == "request_id"
