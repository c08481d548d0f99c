"""What a text model cannot take is refused by the name of its field."""

from __future__ import annotations

import pytest

from pdserve.errors import InvalidRequestError
from router.http.body import parse_object
from router.http.messages import chat_prompt, template_kwargs


def test_fields_of_messages_that_mean_nothing_to_a_text_model() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_prompt([{"role": "assistant", "content": "x", "audio": {"id": "1"}}])
    assert caught.value.field == "messages[0].audio"
    with pytest.raises(InvalidRequestError) as caught:
        chat_prompt([])
    assert caught.value.field == "messages"


def test_a_client_cannot_set_the_messages_of_the_template_by_another_way() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template_kwargs({"messages": []})
    assert caught.value.field == "chat_template_kwargs.messages"
    assert template_kwargs({"enable_thinking": False}) == {"enable_thinking": False}


def test_json_that_is_nested_without_end_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        parse_object(b"[" * 200_000)
