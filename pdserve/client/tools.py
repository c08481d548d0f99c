"""Functions that a model may call, and its calls of them. Calling them is the program's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.client.options import JsonValue, SchemaModel
from pdserve.client.parsing import ModelT, read_json, read_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    """For the model: what it does, and when to call it."""
    parameters: Mapping[str, object] | type[SchemaModel] = field(default_factory=dict)
    """JSON schema of the arguments, which are an object, or a pydantic model. Empty: there are none."""
    strict: bool = False
    """Arguments always validate. They do in any case where `tool_choice` forces a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """What one message of a stream added to one call."""

    index: int
    """Which call of the output this is of, from 0."""
    id: str
    """Set with the first delta of each call, as is the name."""
    name: str
    arguments: str
    """A part of the JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model wants made. Its result goes into a message of role `tool` with its `id`."""

    id: str
    """Empty, as is the name, if the call had begun before this program attached to the request."""
    name: str
    arguments: str
    """A JSON object, as text. Not a whole one in the last call of an output that was cut at `max_tokens`."""

    def json(self) -> JsonValue:
        """The arguments. Raises OutputFormatError."""
        return read_json(self.arguments, self._what, None)

    def parse(self, model: type[ModelT]) -> ModelT:
        """The arguments as an instance of a pydantic model, say that of the tool. Raises OutputFormatError."""
        return read_model(self.arguments, model, self._what, None)

    @property
    def _what(self) -> str:
        return f"the call of {self.name}"
