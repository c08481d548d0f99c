"""Text of a model, fit for a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` with control characters replaced, but for newline and tab.

    A model can emit any byte, and a terminal obeys escape sequences: they could hide or forge what it shows.
    """
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
