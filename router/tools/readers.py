"""Finds the calls in an output as it comes, in the two ways in which models write them.

Whatever the pieces in which the text comes, the parts that come out are the same when they are joined. Text that may
still become a call is held back. What turns out to be none is text, to the character; so is a call of a function that
nobody has offered. White space right before a call belongs to it, and so does what comes between a call and the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import Final, Protocol

from router.tools.call_scanner import CallScanner, ScanState
from router.tools.types import CallDelta, Parsed, joined

CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"

_BETWEEN_OBJECTS: Final = " \t\r\n,;]"


class CallReader(Protocol):
    """Takes an output apart."""

    @property
    def num_calls(self) -> int:
        """Calls that have come so far, a last one that is not complete included."""

    def push(self, text: str) -> Parsed:
        """More of the output."""

    def finish(self) -> Parsed:
        """What was held back, at its end."""


class _Reader(ABC):
    """What the two have in common: text that is looked at from its beginning, and a call that is being read."""

    def __init__(self, names: Container[str], *, max_calls: int | None = None, only_calls: bool = False) -> None:
        """`names`: functions that may be called. Calls after the first `max_calls` are dropped. `only_calls`: the
        output can be nothing else, so what does not look like one is a call that was cut off."""
        self._names = names
        self._only_calls = only_calls
        self._max_calls = max_calls
        self._num_calls = 0
        self._held = ""
        """Not yet looked at, or not enough to know what it is."""
        self._scanner: CallScanner | None = None
        """Of the call that is being read."""
        self._scanned: list[str] = []
        """Its text until it is certain, with what must stay if it is no call."""
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    @property
    def num_calls(self) -> int:
        """See CallReader."""
        return self._num_calls if self._max_calls is None else min(self._num_calls, self._max_calls)

    def push(self, text: str) -> Parsed:
        """See CallReader."""
        self._held += text
        while self._held and (self._look() if self._scanner is None else self._scan(self._scanner)):
            pass
        return self._taken()

    def finish(self) -> Parsed:
        """See CallReader."""
        if self._scanner is None:
            self._content.append(self._rest())
        elif self._scanner.name is None:
            self._content += self._scanned
        self._scanner = None
        self._held = ""
        return self._taken()

    @abstractmethod
    def _look(self) -> bool:
        """Go on with `_held` outside of calls. Returns False if more text is needed for more."""

    @abstractmethod
    def _rest(self) -> str:
        """What of `_held` is text if nothing else comes."""

    @abstractmethod
    def _after_call(self, *, certain: bool) -> None:
        """A call has ended, or what looked like one is text by now. What comes next is in `_held`."""

    def _begin_call(self, before: str, rest: str) -> None:
        """A call may begin with `rest`; `before` is text if it does not."""
        self._scanner = CallScanner(self._names)
        self._scanned = [before]
        self._held = rest

    def _scan(self, scanner: CallScanner) -> bool:
        held, self._held = self._held, ""
        for i, char in enumerate(held):
            was_certain = scanner.name is not None
            state = scanner.feed(char)
            if not was_certain:
                if state is not ScanState.BROKEN:
                    self._scanned.append(char)
                if scanner.name is not None:
                    self._num_calls += 1
                    self._add_call(scanner.name, "")
            if state is not ScanState.OPEN:
                self._held = held[i if state is ScanState.BROKEN else i + 1 :]
                self._end_call(scanner)
                return True
        self._add_call(None, scanner.take_arguments())
        return False

    def _end_call(self, scanner: CallScanner) -> None:
        certain = scanner.name is not None
        if certain:
            self._add_call(None, scanner.take_arguments())
        else:
            self._content += self._scanned
        self._scanner = None
        self._after_call(certain=certain)

    def _add_call(self, name: str | None, arguments: str) -> None:
        if (name or arguments) and self._num_calls == self.num_calls:
            self._calls.append(CallDelta(self._num_calls - 1, name, arguments))

    def _taken(self) -> Parsed:
        content = "" if self._only_calls else "".join(self._content)
        parsed = Parsed(content, joined(self._calls))
        self._content.clear()
        self._calls.clear()
        return parsed


class TaggedReader(_Reader):
    """Calls are between marks, and anything may be around them. A missing end mark is forgiven."""

    _ending = False
    """Whether the end mark of a call comes next."""
    _after = False
    """Whether nothing but white space has come since a call."""
    _has_content = False

    def _look(self) -> bool:
        if self._ending:
            return self._look_for_end()
        begin = self._held.find(CALL_BEGIN)
        if begin >= 0:
            text = self._held[:begin].rstrip()
            self._show(text)
            self._begin_call(self._held[len(text) : begin] + CALL_BEGIN, self._held[begin + len(CALL_BEGIN) :])
            return True
        end = len(self._held) - _overlap(self._held, CALL_BEGIN)
        end = len(self._held[:end].rstrip())
        self._show(self._held[:end])
        self._held = self._held[end:]
        return False

    def _look_for_end(self) -> bool:
        held = self._held.lstrip()
        if CALL_END.startswith(held) and held != CALL_END:
            return False
        self._held = held.removeprefix(CALL_END)
        self._ending = False
        return True

    def _show(self, text: str) -> None:
        if text:
            self._content.append(text if self._has_content or not self._after else text.lstrip())
            self._has_content = True
            self._after = False

    def _rest(self) -> str:
        return "" if self._ending or (self._after and self._held.isspace()) else self._held

    def _after_call(self, *, certain: bool) -> None:
        self._ending = self._after = certain
        self._has_content |= not certain


class ObjectReader(_Reader):
    """The output is one call or several, as objects with separators between them or as a list; or else it is text.

    An object that is no call makes all that follows text.
    """

    _is_text = False
    _has_call = False

    def _look(self) -> bool:
        if self._is_text:
            self._content.append(self._held)
            self._held = ""
            return False
        if self._has_call:
            self._held = self._held.lstrip(_BETWEEN_OBJECTS)
        rest = self._held.lstrip()
        if not self._has_call and rest.startswith("["):
            rest = rest[1:].lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self._begin_call(self._held[: len(self._held) - len(rest)], rest)
        else:
            self._is_text = True
        return True

    def _rest(self) -> str:
        return self._held

    def _after_call(self, *, certain: bool) -> None:
        self._has_call |= certain
        self._is_text = not certain


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
