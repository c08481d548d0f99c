"""Generated text as what it was to be: JSON, or an instance of a model."""

from __future__ import annotations

import json
from typing import TypeVar, cast

from pdserve.client.options import JsonValue, SchemaModel
from pdserve.errors import PdServeError

ModelT = TypeVar("ModelT", bound=SchemaModel)


class OutputFormatError(PdServeError):
    """An output is not what it was to be parsed as: usually because it was cut at `max_tokens`."""

    code = "output_format"


def read_json(text: str, what: str, num_tokens_at_cut: int | None) -> JsonValue:
    """`text` as JSON. `what` names it in errors; `num_tokens_at_cut` is the length of a text that `max_tokens` has cut.

    Raises OutputFormatError.
    """
    try:
        return cast(JsonValue, json.loads(text))
    except ValueError as error:
        raise _not(what, "JSON", num_tokens_at_cut, error) from error


def read_model(text: str, model: type[ModelT], what: str, num_tokens_at_cut: int | None) -> ModelT:
    """`text` as an instance of a pydantic model; the rest as in `read_json`."""
    try:
        return model.model_validate_json(text)
    except ValueError as error:
        raise _not(what, model.__name__, num_tokens_at_cut, error) from error


def _not(what: str, wanted: str, num_tokens_at_cut: int | None, error: ValueError) -> OutputFormatError:
    if num_tokens_at_cut is not None:
        return OutputFormatError(
            f"{what} is not a whole {wanted}: it was cut after {num_tokens_at_cut} tokens; allow more with max_tokens",
            field="max_tokens",
        )
    # The message of the parser may repeat the text, which may be private; it stays with the cause.
    return OutputFormatError(f"{what} is no {wanted} ({type(error).__name__})")
