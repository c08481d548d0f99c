"""Puts Python values into fields of messages, or says which value protobuf cannot carry."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message

from pdserve.errors import InvalidRequestError


def set_field(message: Message, name: str, value: object, field: str | None = None) -> None:
    """Set a scalar field unless the value is None. Raises InvalidRequestError naming `field`, or `name`."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise not_carried(field or name, value, error) from error


def extend_field(message: Message, name: str, values: Iterable[object], field: str) -> None:
    """Append to a repeated scalar field one by one, so that the message about a bad item names its index.

    Raises InvalidRequestError.
    """
    target = getattr(message, name)
    for index, value in enumerate(values):
        try:
            target.append(value)
        except (TypeError, ValueError) as error:
            raise not_carried(f"{field}[{index}]", value, error) from error


def not_carried(field: str, value: object, error: Exception) -> InvalidRequestError:
    """The error about a value that protobuf has refused with `error`."""
    # Text may be private: of a string only its kind is repeated.
    shown = "a string" if isinstance(value, str) else repr(value)
    reason = "is not valid Unicode" if isinstance(error, UnicodeError) else "has the wrong type or is out of range"
    return InvalidRequestError(f"{field}: {shown} {reason}", field=field)
