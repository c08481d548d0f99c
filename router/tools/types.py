"""Functions that a client offers, and what comes of them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments, which are an object. Empty: there are none."""
    strict: bool = False
    """Whether the client counts on arguments that validate, also where it does not force a call."""

    def as_openai(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class ToolMode(enum.StrEnum):
    """Whether the model calls functions."""

    AUTO = "auto"
    REQUIRED = "required"
    FUNCTION = "function"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The functions of one request. A request whose client wants no calls has none of these."""

    tools: tuple[Tool, ...]
    """At least one."""
    mode: ToolMode = ToolMode.AUTO
    function: str = ""
    """The one to call, if the mode is FUNCTION."""
    parallel: bool = True
    """Whether more than one call may be in an output."""

    @property
    def forced(self) -> bool:
        """Whether the output must be calls and nothing else."""
        return self.mode is not ToolMode.AUTO

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that may be called, of those that the model sees."""
        if self.mode is ToolMode.FUNCTION:
            return tuple(tool for tool in self.tools if tool.name == self.function)
        return self.tools


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of one call."""

    index: int
    """Which call of the output, from 0."""
    name: str | None
    """Set in the first one of a call and in no other."""
    arguments: str
    """A part of the JSON text."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What is new of an output, taken apart."""

    content: str
    """Text beside the calls."""
    calls: tuple[CallDelta, ...] = ()
    """In order; at most one of each call."""

    def __add__(self, more: Parsed) -> Parsed:
        return Parsed(self.content + more.content, joined(self.calls + more.calls))


def joined(calls: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """What is new of each call, in one piece. They come one after the other."""
    result: list[CallDelta] = []
    for call in calls:
        if result and result[-1].index == call.index:
            result[-1] = CallDelta(call.index, result[-1].name, result[-1].arguments + call.arguments)
        else:
            result.append(call)
    return tuple(result)
