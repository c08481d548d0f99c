"""Values of fields, for which pydantic has no type: what is checked of them, and what the OpenAPI document says.

Where the document says more than is checked here, the rest is checked by those who read the value.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from pdserve.errors import InvalidRequestError
from pdserve.tokenizer.chat import require_unicode
from router.tools.checks import FUNCTION_NAME

INT32: Final = 2**31 - 1


def _unicode(text: str) -> str:
    try:
        return require_unicode(text, "text")
    except InvalidRequestError as error:
        raise ValueError(error.message.removeprefix("text: ")) from error


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_unicode)]
Id = Annotated[int, Field(ge=0, le=INT32)]
Object = dict[str, Any]
Texts = Annotated[
    list[Text],
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Messages = Annotated[
    list[dict[str, Any]],
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {
                                "type": "array",
                                "minItems": 1,
                                "items": {
                                    "anyOf": [
                                        {"type": "string"},
                                        {
                                            "type": "object",
                                            "required": ["type", "text"],
                                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                                        },
                                    ]
                                },
                            },
                            {"type": "null"},
                        ]
                    },
                    "name": {"type": "string", "description": "Who speaks, for templates that show it."},
                    "tool_calls": {
                        "type": "array",
                        "description": "Calls that an assistant has made, as they were answered.",
                        "items": {
                            "type": "object",
                            "required": ["function"],
                            "properties": {
                                "id": {"type": "string"},
                                "type": {"const": "function"},
                                "function": {
                                    "type": "object",
                                    "required": ["name", "arguments"],
                                    "properties": {
                                        "name": {"type": "string"},
                                        "arguments": {"type": "string", "description": "A JSON object, as JSON text."},
                                    },
                                },
                            },
                        },
                    },
                    "tool_call_id": {"type": "string", "description": "Which call a message of role tool answers."},
                },
            },
        }
    ),
]
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                },
            ]
        }
    ),
]


Schema = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "description": "The same as JSON text."}]})
]
ResponseFormat = Annotated[
    Object,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"enum": ["text", "json_object"]}},
                },
                {
                    "type": "object",
                    "required": ["type", "json_schema"],
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {
                            "type": "object",
                            "required": ["schema"],
                            "properties": {
                                "name": {"type": ["string", "null"]},
                                "schema": {"type": "object"},
                                "strict": {
                                    "type": ["boolean", "null"],
                                    "description": "The output validates in any case.",
                                },
                            },
                        },
                    },
                },
            ]
        }
    ),
]
StructuredOutputs = Annotated[
    Object,
    WithJsonSchema(
        {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 1,
            "properties": {
                "json": {"anyOf": [{"type": "object"}, {"type": "string"}]},
                "json_object": {"const": True},
                "regex": {"type": "string"},
                "choice": {"type": "array", "minItems": 1, "items": {"type": "string"}},
                "grammar": {"type": "string"},
            },
        }
    ),
]
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": {"type": "string"}},
                        },
                    },
                },
            ]
        }
    ),
]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)

    include_usage: bool | None = None
    """Send usage in one more chunk at the end, with empty `choices`."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every chunk as well."""


class FunctionDefinition(BaseModel):
    """Part of `Tool`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=rf"^{FUNCTION_NAME.pattern}$")]
    """What the model calls it."""
    description: Text | None = None
    """What it does, for the model."""
    parameters: Object | None = None
    """JSON schema of the arguments. Default: there are none."""
    strict: bool | None = None
    """Whether arguments always validate. They do in any case where `tool_choice` forces a call."""


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)

    type: Literal["function"]
    function: FunctionDefinition
