"""Where a prompt comes from."""

from __future__ import annotations

import sys

from pdserve.errors import InvalidRequestError


def read_prompt(argument: str) -> str:
    """The argument, or standard input for `-`. Raises InvalidRequestError if it is not UTF-8."""
    source = "standard input" if argument == "-" else "argument"
    try:
        # Bytes of an argument that are not UTF-8 arrive as lone surrogates, which do not encode.
        return sys.stdin.buffer.read().decode() if argument == "-" else argument.encode().decode()
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"prompt: {source} is not UTF-8: {error.reason}", field="prompt") from error
