"""Which prompts are encoded at once, and that it makes no difference to their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import InvalidRequestError
from pdserve.testing.tiny_tokenizers import CHAT_TEMPLATE, END_OF_TURN, byte_level_tokenizer, save_tokenizer
from pdserve.tokenizer.from_hf import tokenizer_from_hf
from router.index import HASH_INLINE_TOKENS
from router.prompts import MAX_INLINE_CHARACTERS, MAX_INLINE_MESSAGES, Prompts
from router.tools.types import Tool, ToolUse
from router.validation import ChatInput, PromptInput, TextInput, TokenInput


@pytest.fixture
def prompts(tmp_path: Path) -> Iterator[Prompts]:
    save_tokenizer(byte_level_tokenizer(add_bos=True), tmp_path, chat_template=CHAT_TEMPLATE)
    made = Prompts(tokenizer_from_hf(tmp_path))
    yield made
    made.close()


def chat(*contents: str, role: str = "user", **fields: Any) -> ChatInput:
    return ChatInput(tuple({"role": role, "content": content} for content in contents), **fields)


SHORT: list[PromptInput] = [
    TextInput("the water of that"),
    TextInput("with no BOS", add_special_tokens=False),
    TokenInput((5, 6, 7)),
    chat("one", "two"),
    chat("open", continue_final_message=True, add_generation_prompt=False),
]
LONG: list[PromptInput] = [
    TextInput("a" * (MAX_INLINE_CHARACTERS + 1)),
    TokenInput((7,) * (HASH_INLINE_TOKENS + 1)),
    chat("a" * MAX_INLINE_CHARACTERS),
    chat(*"a" * (MAX_INLINE_MESSAGES + 1)),
    # Nobody knows how long a template goes on about these.
    chat("tools", tools=ToolUse(tools=(Tool(name="f", description="", parameters={}),))),
    chat("variables", template_kwargs={"depth": 7}),
    # The first one of these builds a tokenizer of its own.
    chat(f"what is {END_OF_TURN}?"),
]


@pytest.mark.parametrize("prompt", SHORT, ids=str)
async def test_a_short_prompt_is_encoded_at_once_and_the_same(prompts: Prompts, prompt: PromptInput) -> None:
    ids = prompts.encode_now(prompt)
    assert ids is not None and len(ids) > 0
    assert list(ids) == list(await prompts.encode(prompt))


@pytest.mark.parametrize("prompt", LONG, ids=lambda prompt: str(prompt)[:60])
async def test_what_may_take_long_is_left_to_a_thread(prompts: Prompts, prompt: PromptInput) -> None:
    assert prompts.encode_now(prompt) is None
    assert len(await prompts.encode(prompt)) > 0


async def test_a_refused_chat_is_refused_in_the_same_words(prompts: Prompts) -> None:
    refused = chat("x", role="nobody")
    with pytest.raises(InvalidRequestError) as now:
        prompts.encode_now(refused)
    with pytest.raises(InvalidRequestError) as later:
        await prompts.encode(ChatInput(refused.messages, template_kwargs={"in": "a thread"}))
    assert now.value.field == later.value.field == "chat.messages[0].role"
    assert now.value.message == later.value.message
