"""Finds stop strings in text that arrives in pieces, and holds back what may still become one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pdserve.errors import InvalidRequestError


class StopStringMatcher:
    """Aho-Corasick automaton over characters, run over the text as it comes.

    The match that is complete first ends the text; of several that are complete at the same character, the longest.
    So the result does not depend on how the text was cut into pieces, and the cost is linear in the text, however
    many stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequestError when a stop string is empty: it would match at once."""
        for i, stop in enumerate(stops):
            if not stop:
                raise InvalidRequestError(f"stop.strings[{i}]: must not be empty", field=f"stop.strings[{i}]")
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        """Node of the longest proper suffix of this node's text that begins some stop string."""
        self._depth = [0]
        """Length of the node's text: as many characters have to be held back there."""
        self._match: list[str | None] = [None]
        """The longest stop string that ends at the node."""
        self._build(stops)
        self._node = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes more text: (text that is certain to be before any stop string, the stop string matched or None).

        After a match there is nothing more to come, and nothing may be pushed.
        """
        assert self._matched is None, "text pushed after a stop string was matched"
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._node = self._step(self._node, char)
            if (stop := self._match[self._node]) is not None:
                self._matched, self._held = stop, ""
                return pending[: end - len(stop)], stop
        cut = len(pending) - self._depth[self._node]
        self._held = pending[cut:]
        return pending[:cut], None

    def finish(self) -> str:
        """What was held back, at the end of the text; nothing after a match."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(char, 0)

    def _build(self, stops: Sequence[str]) -> None:
        for stop in stops:
            node = 0
            for char in stop:
                if char not in self._next[node]:
                    self._next[node][char] = len(self._next)
                    self._next.append({})
                    self._fallback.append(0)
                    self._depth.append(self._depth[node] + 1)
                    self._match.append(None)
                node = self._next[node][char]
            self._match[node] = stop
        # Breadth first, so that fallbacks, which are shorter, are finished before they are used.
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                self._fallback[child] = self._step(self._fallback[node], char)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fallback[child]]
                queue.append(child)
