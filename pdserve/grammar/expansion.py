"""How long a grammar becomes when its counted repetitions are written out: known before anything is compiled.

llguidance writes out what is repeated so many times where it is plain text, and copies the result for each state of its
automaton. `(a{1000}){1000}` is 15 bytes, and a megabyte then: minutes and gigabytes, which none of its own limits
counts. Here a scan of the source adds up characters and multiplies them where something is repeated. It may be a little
off for what it does not understand, and there llguidance has the last word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

MAX_EXPANDED: Final = 100_000
"""Characters. Takes about half a second and 50 MB."""

_REPEAT: Final = r"\{\s*(?P<at_least>\d*)\s*(?:,\s*(?P<at_most>\d*)\s*)?\}"
_EXPRESSION: Final = re.compile(
    rf"(?P<one>\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])|(?P<open>\()|(?P<close>\))|{_REPEAT}|(?P<other>.)", re.DOTALL
)
_LARK: Final = re.compile(
    r'(?P<quoted>"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/)|(?P<name>\b_*[A-Z][A-Z0-9_]*\b)|(?P<space>\s+|//[^\n]*)'
    rf"|(?P<open>\()|(?P<close>\))|{_REPEAT}|~\s*(?P<times>\d+)(?:\s*\.\.\s*(?P<upto>\d+))?|(?P<other>.)",
    re.DOTALL,
)
_COUNTS: Final = frozenset({"at_least", "at_most", "times", "upto"})
_TERMINAL: Final = re.compile(r"^[ \t]*(_*[A-Z][A-Z0-9_]*)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_RULE: Final = re.compile(r"^[ \t]*[?!]?\w+(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:|^[ \t]*%", re.MULTILINE)


def expression_length(source: str) -> int:
    """Of a regular expression; more than MAX_EXPANDED is not counted any further."""
    return _length(_EXPRESSION, source, lambda match: 1)


def json_length(value: Any) -> int:
    """Of the longest text in a schema: any may be an expression."""
    return max(map(expression_length, _texts(value)), default=0)


def lark_length(source: str) -> int:
    """Of the longest definition in a grammar. Terminals stand for their definitions, as they are put in there."""
    starts = [0, *(match.start() for match in _RULE.finditer(source))]
    parts = [source[begin:end] for begin, end in zip(starts, [*starts[1:], len(source)], strict=True)]
    terminals: dict[str, str] = {}
    for part in parts:
        if (head := _TERMINAL.match(part)) is not None:
            terminals[head[1]] = part[head.end() :]
    lengths = _terminal_lengths(terminals)
    return max((_lark_length(part, lengths) for part in parts), default=0)


def _terminal_lengths(terminals: Mapping[str, str]) -> dict[str, int]:
    """Those that one consists of come first, without recursion: a chain of them may be long."""
    lengths: dict[str, int] = {}
    begun: set[str] = set()
    stack = list(terminals)
    while stack:
        name = stack[-1]
        if name not in begun:
            begun.add(name)
            parts = {match["name"] for match in _LARK.finditer(terminals[name]) if match["name"]}
            # One that leads back to itself is an error, which llguidance reports.
            stack += [part for part in parts if part in terminals and part not in begun]
            continue
        stack.pop()
        if name not in lengths:
            lengths[name] = _lark_length(terminals[name], lengths)
    return lengths


def _lark_length(source: str, lengths: Mapping[str, int]) -> int:
    def length_of(match: re.Match[str]) -> int:
        if match["quoted"]:
            return expression_length(match["quoted"][1:-1])
        return lengths.get(match["name"], 1) if match["name"] else 0 if match["space"] else 1

    return _length(_LARK, source, length_of)


def _length(tokens: re.Pattern[str], source: str, length_of: Callable[[re.Match[str]], int]) -> int:
    totals, last = [0], 0
    for match in tokens.finditer(source):
        kind = match.lastgroup
        if kind == "open":
            totals.append(0)
            continue
        if kind == "close":
            last = totals.pop() if len(totals) > 1 else 0
        elif kind in _COUNTS and (count := _count(match)) is not None:
            totals[-1] = min(totals[-1] + last * max(0, count - 1), MAX_EXPANDED + 1)
            last *= max(1, count)
            continue
        elif (length := length_of(match)) or kind != "space":
            last = length
        else:
            continue
        totals[-1] = min(totals[-1] + last, MAX_EXPANDED + 1)
        last = min(last, MAX_EXPANDED + 1)
    return min(sum(totals), MAX_EXPANDED + 1)


def _count(match: re.Match[str]) -> int | None:
    """How often what stands before is repeated at most; None if this is no repetition."""
    groups = match.groupdict()
    numbers = [groups.get(name) for name in _COUNTS]
    given = [min(int(number[:9]), MAX_EXPANDED + 1) for number in numbers if number]
    return max(given) if given else None


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
