"""What HTTP clients see of errors, and how bodies are read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve import errors
from pdserve.errors import InvalidRequestError, NotFoundError, PdServeError, PromptTooLongError
from router.http.body import parse_object
from router.http.errors import (
    STATUS_OF_CODE,
    HttpRequestError,
    error_body,
    error_json,
    error_response,
    on_bug,
    status_of,
)
from router.http.plans import FieldNames

BETWEEN_PROCESSES = {"incompatible_workers", "stale_attempt", "config", "model_load", "internal"}


def all_errors(base: type[PdServeError] = PdServeError) -> Iterator[type[PdServeError]]:
    for kind in base.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
            yield from all_errors(kind)


def test_every_error_that_a_client_can_cause_or_meet_has_a_status() -> None:
    codes = {kind.code for kind in all_errors()}
    assert codes - STATUS_OF_CODE.keys() == BETWEEN_PROCESSES
    assert {status_of(kind("x")) for kind in all_errors() if kind.code in BETWEEN_PROCESSES} == {500}


def test_clients_are_told_to_try_again_exactly_where_it_may_help() -> None:
    """OpenAI's client tries 408, 409, 429 and 5xx again."""
    for kind in all_errors():
        status = status_of(kind("x"))
        if kind.retryable:
            assert status in (429, 503), kind
        elif status >= 500:
            assert status in (500, 504), kind


def test_the_shape_is_openais() -> None:
    assert error_body(PromptTooLongError("prompt: too long", field="prompt")) == {
        "error": {
            "message": "prompt: too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
    }
    assert error_body(NotFoundError("x", field="model"))["error"]["code"] == "model_not_found"
    assert error_body(NotFoundError("x", field="request_id"))["error"]["code"] == "not_found"
    assert error_body(errors.OverloadedError("x"))["error"]["type"] == "rate_limit_error"
    assert error_body(errors.WorkerLostError("x"))["error"]["type"] == "server_error"


def test_a_delay_is_rounded_up_to_whole_seconds() -> None:
    response = error_response(errors.UnavailableError("x", retry_after_s=1.2))
    assert response.headers["retry-after"] == "2"
    assert error_response(errors.OverloadedError("x", retry_after_s=0.01)).headers["retry-after"] == "1"
    assert "retry-after" not in error_response(errors.InternalError("x")).headers


def test_what_a_client_sent_cannot_break_the_answer() -> None:
    """O-VAL-4: the error itself must be writable."""
    body = error_json(InvalidRequestError("got '\ud800\x00'", field="x\udfff"))
    assert json.loads(body)["error"]["message"] == "got '\ud800\x00'"
    assert body.isascii()


def test_a_bug_says_nothing_about_itself() -> None:
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"",
        "server": ("x", 1), "scheme": "http", "root_path": "",
    }  # fmt: skip
    from starlette.requests import Request

    response = asyncio.run(on_bug(Request(scope), ValueError("secret")))
    assert response.status_code == 500
    assert b"secret" not in bytes(response.body)


@pytest.mark.parametrize(
    ("message", "field", "renamed", "renamed_field"),
    [
        ("text: the prompt is empty", "text", "prompt[2]: the prompt is empty", "prompt[2]"),
        ("token_ids.ids[7]: must be", "token_ids.ids[7]", "prompt[2][7]: must be", "prompt[2][7]"),
        ("sampling.top_p: a; stop.stop[1]: b", "sampling.top_p", "top_p: a; stop[1]: b", "top_p"),
        ("stop.min_tokens: exceeds (stop.max_tokens)", "stop.min_tokens", "min_tokens: exceeds (max_n)", "min_tokens"),
        ("prompt_logprobs: few", "prompt_logprobs", "logprobs: few", "logprobs"),
        ("sampling.logit_bias[7]: c", "sampling.logit_bias[7]", "logit_bias[7]: c", "logit_bias[7]"),
        ("the text: is long", None, "the text: is long", None),
        ("request_id: x", "request_id", "request_id: x", "request_id"),
        ("model: 'text: a' is not served", "model", "model: 'text: a' is not served", "model"),
    ],
)
def test_fields_of_the_core_get_the_names_that_the_client_knows(
    message: str, field: str | None, renamed: str, renamed_field: str | None
) -> None:
    names = FieldNames(prompt="prompt", max_tokens="max_n").at(2)
    error = names.renamed(InvalidRequestError(message, field=field))
    assert (error.message, str(error), error.field) == (renamed, renamed, renamed_field)
    assert names.renamed(error).message == renamed, "once is enough"


def test_messages_of_a_chat_keep_their_path() -> None:
    names = FieldNames(logprobs="top_logprobs")
    error = names.renamed(InvalidRequestError("chat.messages[1].role: x; logprobs: y", field="chat.messages[1].role"))
    assert (error.message, error.field) == ("messages[1].role: x; top_logprobs: y", "messages[1].role")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 10**5])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"^body: "):
        parse_object(body)


def test_a_json_object_is_taken() -> None:
    assert parse_object('{"a": [1, 2.5, null, "ü"]}'.encode()) == {"a": [1, 2.5, None, "ü"]}


def test_errors_of_http_itself_carry_their_status() -> None:
    assert error_response(HttpRequestError("x", status=413)).headers["connection"] == "close"
    assert status_of(HttpRequestError("x", status=408)) == 408
