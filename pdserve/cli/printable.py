"""Text of a model on standard output."""

from __future__ import annotations

import re
import sys

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` with control characters replaced, but for newline and tab.

    A model can emit any byte, and a terminal obeys escape sequences: they could hide or forge what it shows.
    """
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def show(text: str) -> None:
    """Write to standard output at once: fit for a terminal if that is one; a file gets the text as it is."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
