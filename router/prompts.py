"""Tokenization for the router: off the event loop where it may take long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, TypeVar

from pdserve.errors import InvalidRequestError
from pdserve.tokenizer import Tokenizer
from router.index import HASH_INLINE_TOKENS
from router.tools.formats import ToolFormat, tool_format_of
from router.tools.output import ToolOutput
from router.tools.prompt import plain_messages, tool_variables
from router.validation import ChatInput, PromptInput, TextInput, TokenInput

_T = TypeVar("_T")

MAX_INLINE_CHARACTERS: Final = 3072
"""Text up to this length, some 700 tokens, takes well under a millisecond, and 3 ms if it is all digits or emoji. A hop
to a thread and back costs a good part of the former, and is waited for."""

MAX_INLINE_MESSAGES: Final = 32
"""A chat template runs once through its loop for each."""

NUM_THREADS: Final = 2
"""More would only take turns on the interpreter lock for chat templates; encoding itself releases it."""


class Prompts:
    """Turns what clients send into token ids and back."""

    def __init__(self, tokenizer: Tokenizer, *, tool_format: Literal["auto", "hermes", "json"] = "auto") -> None:
        self.tokenizer = tokenizer
        self.tool_format: ToolFormat = tool_format_of(tool_format, tokenizer.chat_template_source)
        """How the model writes calls of functions."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Start nothing more; what runs in a thread ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def tool_output(self, prompt: PromptInput, request_id: str, index: int) -> ToolOutput | None:
        """What finds calls of functions in the output with that index over all prompts of a request; None if there are
        none to be found."""
        if not isinstance(prompt, ChatInput) or prompt.tools is None:
            return None
        return ToolOutput(self.tool_format, prompt.tools, request_id, index)

    async def encode(self, prompt: PromptInput) -> Sequence[int]:
        """Token ids of a prompt. Raises InvalidRequestError naming the field, for example if a chat is refused."""
        match prompt:
            case TokenInput():
                return prompt.token_ids
            case TextInput():
                return await self.encode_text(prompt.text, add_special_tokens=prompt.add_special_tokens)
            case ChatInput():
                return await self.encode_chat(prompt)

    def encode_now(self, prompt: PromptInput) -> Sequence[int] | None:
        """As `encode`, before it returns; None for a prompt that may take long, or that nobody knows how long."""
        match prompt:
            case TokenInput():
                return prompt.token_ids if len(prompt.token_ids) <= HASH_INLINE_TOKENS else None
            case TextInput():
                if len(prompt.text) > MAX_INLINE_CHARACTERS:
                    return None
                return self.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
            case ChatInput():
                return self._encode_checked_chat(prompt) if self._is_short(prompt) else None

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Token ids of raw text."""
        if len(text) <= MAX_INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self._in_thread(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(self, chat: ChatInput) -> Sequence[int]:
        """Token ids of a chat, rendered with the model's template."""
        if self._is_short(chat):
            return self._encode_checked_chat(chat)
        return await self._in_thread(lambda: self._encode_checked_chat(chat))

    def _encode_checked_chat(self, chat: ChatInput) -> Sequence[int]:
        try:
            return self._encode_chat(chat)
        except InvalidRequestError as error:
            # The tokenizer knows messages, not our request.
            raise InvalidRequestError(f"chat.{error.message}", field=f"chat.{error.field}") from error

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        if len(token_ids) <= MAX_INLINE_CHARACTERS:
            return self.tokenizer.decode(token_ids, skip_special_tokens)
        return await self._in_thread(lambda: self.tokenizer.decode(token_ids, skip_special_tokens))

    def _encode_chat(self, chat: ChatInput) -> Sequence[int]:
        messages: Sequence[Mapping[str, Any]] = chat.messages
        variables = dict(chat.template_kwargs)
        if self.tokenizer.chat_template_takes_tools:
            variables |= tool_variables(chat.tools)
        else:
            messages = plain_messages(messages, chat.tools, self.tool_format)
        return self.tokenizer.encode_chat(
            messages,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            **variables,
        )

    def _is_short(self, chat: ChatInput) -> bool:
        """Whether it takes no longer than its text does. A template is somebody else's code: what it makes of tools and
        variables nobody knows."""
        messages = chat.messages
        if chat.tools is not None or chat.template_kwargs or len(messages) > MAX_INLINE_MESSAGES:
            return False
        if any("tool_calls" in message for message in messages):
            return False
        if sum(len(text) for message in messages for text in message.values()) > MAX_INLINE_CHARACTERS:
            return False
        return not self.tokenizer.spells_special(messages)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
