"""Reads one call, a JSON object with the name of a function and its arguments, as it is written."""

from __future__ import annotations

import enum
import json
from collections.abc import Container
from typing import Any, Final

_SPACE: Final = " \t\r\n"
_KEYS: Final = frozenset({"name", "arguments", "parameters", "type", "id"})
_ARGUMENTS: Final = ("arguments", "parameters")
_OUTSIDE_STRINGS: Final = frozenset("{}[]:,+-.0123456789abcdefghijklmnopqrstuvwxyzE" + _SPACE)
"""More than JSON has, which is enough to see that something else has begun."""


class ScanState(enum.Enum):
    """How far a call is."""

    OPEN = enum.auto()
    """More is to come."""
    DONE = enum.auto()
    """The object is closed."""
    BROKEN = enum.auto()
    """The last character cannot be part of a call."""


class _Place(enum.Enum):
    OBJECT = enum.auto()
    KEY_OR_END = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    STRING = enum.auto()
    NESTED = enum.auto()
    SCALAR = enum.auto()


class CallScanner:
    """Takes the characters of one object, from its brace or the white space before it on.

    The call is certain (`name` is set) once it has the name of a known function and its arguments have begun, or the
    object is closed without any. Arguments are given out as they are written. Where the model has written them as a
    string of JSON, which some do, they are what the string says.
    """

    def __init__(self, names: Container[str]) -> None:
        """`names`: functions that may be called."""
        self.name: str | None = None
        self.state = ScanState.OPEN
        self._names = names
        self._place = _Place.OBJECT
        self._key = ""
        self._raw: list[str] = []
        """Of the key or value that is being read."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._found_name = ""
        self._has_arguments = False
        self._arguments: list[str] = []
        """Not yet taken."""

    def feed(self, char: str) -> ScanState:
        """One more character. Nothing may come after DONE or BROKEN."""
        assert self.state is ScanState.OPEN, "nothing comes after the end"
        match self._place:
            case _Place.OBJECT:
                if char == "{":
                    self._go(_Place.KEY_OR_END)
                elif char not in _SPACE:
                    self._break()
            case _Place.KEY_OR_END:
                self._key_or_end(char)
            case _Place.KEY:
                self._string(char)
            case _Place.COLON:
                if char == ":":
                    self._go(_Place.VALUE)
                elif char not in _SPACE:
                    self._break()
            case _Place.VALUE:
                self._begin_value(char)
            case _Place.STRING:
                self._string(char)
            case _Place.NESTED:
                self._nested(char)
            case _Place.SCALAR:
                self._scalar(char)
        return self.state

    def take_arguments(self) -> str:
        """What is new of the arguments; empty until the call is certain."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _go(self, place: _Place) -> None:
        self._place = place
        self._raw.clear()

    def _break(self) -> None:
        self.state = ScanState.BROKEN

    def _key_or_end(self, char: str) -> None:
        if char == '"':
            self._go(_Place.KEY)
        elif char == "}":
            if not self._found_name:
                self._break()
                return
            if not self._has_arguments:
                self._arguments.append("{}")
            self.name = self._found_name
            self.state = ScanState.DONE
        elif char not in _SPACE and char != ",":
            self._break()

    def _begin_value(self, char: str) -> None:
        if char in _SPACE:
            return
        is_arguments = self._key in _ARGUMENTS
        if is_arguments and (self._has_arguments or char not in '{"n'):
            # Twice, or no object: not a call that anybody could make.
            self._break()
            return
        if char == '"':
            self._go(_Place.STRING)
        elif char in "{[":
            self._go(_Place.NESTED)
            self._depth = 1
            self._in_string = self._escaped = False
            if is_arguments:
                self._has_arguments = True
                self._arguments.append(char)
                self._settle()
        elif char in _OUTSIDE_STRINGS and char not in "]}:,":
            self._go(_Place.SCALAR)
            self._raw.append(char)
        else:
            self._break()

    def _string(self, char: str) -> None:
        """A key or a string value, up to its closing quote."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._end_string()
            return
        self._raw.append(char)

    def _end_string(self) -> None:
        try:
            value = json.loads('"' + "".join(self._raw) + '"', strict=False)
        except ValueError:
            self._break()
            return
        if self._place is _Place.STRING:
            self._end_value(value)
            return
        self._key = value
        if value in _KEYS:
            self._go(_Place.COLON)
        else:
            # The answer is some other object, and may be long: better known now than at its end.
            self._break()

    def _nested(self, char: str) -> None:
        """An object or a list, up to its closing bracket. Inside only brackets and strings are told apart."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char not in _OUTSIDE_STRINGS:
            self._break()
            return
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._key in _ARGUMENTS:
            self._arguments.append(char)
        if not self._depth:
            self._go(_Place.KEY_OR_END)

    def _scalar(self, char: str) -> None:
        if char not in _SPACE and char not in ",}":
            if char in _OUTSIDE_STRINGS:
                self._raw.append(char)
            else:
                self._break()
            return
        self._end_value(None if self._raw == list("null") else "".join(self._raw))
        if self.state is ScanState.OPEN:
            self._key_or_end(char)

    def _end_value(self, value: Any) -> None:
        """A string, or null, or (as its text) another scalar."""
        self._go(_Place.KEY_OR_END)
        if self._key == "name":
            if not isinstance(value, str) or self._found_name or value not in self._names:
                self._break()
                return
            self._found_name = value
            self._settle()
        elif self._key in _ARGUMENTS:
            text = "{}" if value is None else value.strip()
            if not text.startswith("{"):
                self._break()
                return
            self._has_arguments = True
            self._arguments.append(text)
            self._settle()

    def _settle(self) -> None:
        if self._found_name and self._has_arguments:
            self.name = self._found_name
