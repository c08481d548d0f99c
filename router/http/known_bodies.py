"""Bodies that differ in their prompt alone: what was checked of one is not checked again for the next.

A client sends thousands of bodies with the same few parameters. What they mean depends on nothing else, so it is kept,
without any prompt, and only the prompt of a new body is looked at. Whatever is unusual about a body, everything that is
wrong with it included, is left to the general way.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pdserve.config.schema import RouterSection
from router.http.fields import ChatBody, CompletionBody
from router.http.plans import Plan
from router.validation import ChatInput, PromptInput, TextInput, check_request_id

MAX_KNOWN: Final = 512
MAX_KEY_CHARACTERS: Final = 4096
"""Of the parameters of one body."""

_PLAIN_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PLAIN_MESSAGE: Final = {"role", "content"}
_NOT_KNOWN: Final = {"request_id", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"} | {
    "continue_final_message",
    "resumable",
}
"""Fields of bodies that are checked anew each time: names, and what goes together with the prompt."""


class TakePrompt(Protocol):
    """Takes a prompt, as JSON, on top of one that it is otherwise like; None if it is not a plain one."""

    def __call__(self, value: Any, like: PromptInput | None, config: RouterSection) -> PromptInput | None: ...


@dataclass(frozen=True, slots=True)
class _Known:
    """What a body means but for its prompt."""

    plan: Plan
    has_seed: bool


class KnownBodies:
    """Of one endpoint. Use it in one event loop."""

    def __init__(self, prompt_field: str, fields: frozenset[str], take: TakePrompt) -> None:
        """`fields` are those that bodies may have, `prompt_field` the one of them that `take` reads."""
        self._prompt_field = prompt_field
        self._fields = fields - _NOT_KNOWN
        self._take = take
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        """Sets of parameters that are remembered."""
        return len(self._known)

    def plan(self, value: Mapping[str, Any], config: RouterSection, check: Callable[[], Plan]) -> Plan:
        """What `check` would say of the body `value`. Raises what it raises."""
        key = self._key(value)
        known = None if key is None else self._known.get(key)
        if known is not None:
            (checked,) = known.plan.prompts
            prompt = self._take(value[self._prompt_field], checked.prompt, config)
            if prompt is not None:
                sampling = checked.sampling
                if not known.has_seed:
                    sampling = dataclasses.replace(sampling, seed=secrets.randbits(64))
                checked = dataclasses.replace(checked, prompt=prompt, sampling=sampling)
                return dataclasses.replace(known.plan, request_id=check_request_id(""), prompts=(checked,))
        plan = check()
        if key is not None and known is None and self._take(value[self._prompt_field], None, config) is not None:
            self._remember(key, plan, has_seed=value.get("seed") is not None)
        return plan

    def _key(self, value: Mapping[str, Any]) -> str | None:
        """Everything but the prompt: JSON values are told apart by how Python writes them, types included."""
        if not self._fields.issuperset(value) or self._prompt_field not in value:
            return None
        key = repr([item for item in value.items() if item[0] != self._prompt_field])
        return key if len(key) <= MAX_KEY_CHARACTERS else None

    def _remember(self, key: str, plan: Plan, *, has_seed: bool) -> None:
        if len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        (checked,) = plan.prompts
        match checked.prompt:
            case TextInput():
                nothing: PromptInput = dataclasses.replace(checked.prompt, text="")
            case ChatInput():
                nothing = dataclasses.replace(checked.prompt, messages=())
            case _:
                return
        checked = dataclasses.replace(checked, prompt=nothing)
        self._known[key] = _Known(dataclasses.replace(plan, prompts=(checked,)), has_seed)


def known_completions() -> KnownBodies:
    """Of /v1/completions."""
    return KnownBodies("prompt", frozenset(CompletionBody.model_fields), _take_text)


def known_chats() -> KnownBodies:
    """Of /v1/chat/completions."""
    return KnownBodies("messages", frozenset(ChatBody.model_fields), _take_chat)


def _take_text(value: Any, like: PromptInput | None, config: RouterSection) -> PromptInput | None:
    if type(value) is not str or not _fits([value], config):
        return None
    return dataclasses.replace(like, text=value) if isinstance(like, TextInput) else TextInput(value)


def _take_chat(value: Any, like: PromptInput | None, config: RouterSection) -> PromptInput | None:
    if type(value) is not list:
        return None
    messages = []
    for message in value:
        if type(message) is not dict or message.keys() != _PLAIN_MESSAGE:
            return None
        role, content = message["role"], message["content"]
        if type(role) is not str or type(content) is not str or role not in _PLAIN_ROLES:
            return None
        messages.append({"role": _PLAIN_ROLES[role], "content": content})
    # Whether anybody has said anything is for the general way to judge if there is doubt.
    if not any(m["role"] == "user" and not m["content"].isspace() and m["content"] for m in messages):
        return None
    if not _fits([message["content"] for message in messages], config):
        return None
    taken = tuple(messages)
    return dataclasses.replace(like, messages=taken) if isinstance(like, ChatInput) else ChatInput(taken)


def _fits(texts: list[str], config: RouterSection) -> bool:
    """Whether they are valid Unicode, and not too long to look at."""
    try:
        return sum(len(text.encode()) for text in texts) <= config.max_prompt_bytes
    except UnicodeEncodeError:
        return False
