"""Ids of server-sent events: how far a client is in each choice, so that a stream can go on behind any of its events.

An id has one part for each choice, in their order and with commas between: nothing before the choice has begun, then
the number of its tokens that all was sent of, and `.j` behind it if j more events were sent that follow those tokens
but do not complete the next one: `12`, `12.1`, `3,,5.1`. The event with the usage at the end of a stream has an id of
its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.errors import InvalidRequestError

END: Final = "end"
"""Everything was sent but the end mark."""

_PART: Final = re.compile(r"(?:([0-9]{1,9})(?:\.([0-9]{1,9}))?)?")


@dataclass(slots=True)
class Place:
    """Where a client is in the events of one choice."""

    begun: bool = False
    num_tokens: int = 0
    num_events: int = 0
    """After those tokens."""

    def __str__(self) -> str:
        if self.num_events:
            return f"{self.num_tokens}.{self.num_events}"
        return str(self.num_tokens) if self.begun else ""

    def advance(self, num_tokens: int) -> None:
        """All was sent of so many tokens."""
        self.begun, self.num_tokens, self.num_events = True, num_tokens, 0


def event_id(places: Sequence[Place]) -> str:
    """Of the event that brings a client there."""
    return ",".join(map(str, places))


def parse_event_id(text: str, num_choices: int) -> list[Place]:
    """The places that an id stands for; the empty one stands for the beginning. Raises InvalidRequestError."""
    if not text:
        return [Place() for _ in range(num_choices)]
    parts = [_PART.fullmatch(part) for part in text.split(",")]
    if len(parts) != num_choices or None in parts:
        raise InvalidRequestError(
            f"Last-Event-ID: {text[:64]!r} is no id of this stream, which has {num_choices} choices",
            field="Last-Event-ID",
        )
    return [_place(*part.groups()) for part in parts if part is not None]


def _place(num_tokens: str | None, num_events: str | None) -> Place:
    return Place() if num_tokens is None else Place(True, int(num_tokens), int(num_events or 0))
