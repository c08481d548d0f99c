"""Workloads from files, one request a line: texts, token ids, or the lengths and arrivals of a trace.

| kind of line | fields |
|---|---|
| text | `prompt` (or `text`, `question`, or the first of `turns`), optionally `output_tokens` |
| tokens | `token_ids`, optionally `output_tokens` |
| Mooncake trace | `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one for each 512 prompt tokens) |
| Azure trace (CSV) | `TIMESTAMP` (ISO), `ContextTokens`, `GeneratedTokens` |

Any of them may be compressed (`.gz`). A line that is none of these is refused with its number and the field at fault.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from pdserve.errors import InvalidRequestError

TEXT_FIELDS = ("prompt", "text", "question")
TRACE_BLOCK_TOKENS = 512
"""Prompt tokens that one of `hash_ids` stands for, in Mooncake's traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One line. Exactly one of `text`, `token_ids` and `input_tokens` is set."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    input_tokens: int | None = None
    hash_ids: tuple[int, ...] = ()
    output_tokens: int | None = None
    arrival_s: float | None = None
    """Since the record's beginning, whatever that is."""


def read_requests(path: Path, limit: int | None = None) -> list[RecordedRequest]:
    """The first `limit` requests of a file, or all. Raises InvalidRequestError."""
    try:
        with _opened(path) as lines:
            rows = _csv_rows(path, lines) if ".csv" in path.suffixes else _json_rows(path, lines)
            requests: list[RecordedRequest] = []
            for where, row in rows:
                if limit is not None and len(requests) == limit:
                    break
                requests.append(_azure(where, row) if "TIMESTAMP" in row else _request(where, row))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise InvalidRequestError(f"cannot read {path}: {error}") from error
    if not requests:
        raise InvalidRequestError(f"{path}: there is no request in it")
    return requests


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _json_rows(path: Path, lines: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidRequestError(f"{where}: is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise InvalidRequestError(f"{where}: must be a JSON object, is a {type(row).__name__}")
        yield where, row


def _csv_rows(path: Path, lines: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(lines)
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if missing := wanted - set(reader.fieldnames or ()):
        raise InvalidRequestError(f"{path}:1: the header lacks {', '.join(sorted(missing))}")
    for row in reader:
        yield f"{path}:{reader.line_num}", row


def _azure(where: str, row: dict[str, Any]) -> RecordedRequest:
    stamp = str(row["TIMESTAMP"])
    # Seven digits of a second; Python reads six.
    whole, _, fraction = stamp.partition(".")
    try:
        arrival = datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}").timestamp()
    except ValueError as error:
        raise InvalidRequestError(f"{where}: TIMESTAMP: must be a date and time, is {stamp!r}") from error
    numbers = {}
    for name in ("ContextTokens", "GeneratedTokens"):
        text = row.get(name)
        try:
            numbers[name] = int(text or "")
        except ValueError as error:
            raise InvalidRequestError(f"{where}: {name}: must be a whole number, is {text!r}") from error
    return RecordedRequest(
        input_tokens=max(numbers["ContextTokens"], 1),
        output_tokens=max(numbers["GeneratedTokens"], 1),
        arrival_s=arrival,
    )


def _request(where: str, row: dict[str, Any]) -> RecordedRequest:
    if "input_length" in row:
        hash_ids = _whole_numbers(where, row, "hash_ids") if "hash_ids" in row else ()
        length = _count(where, row, "input_length")
        needed = -(-length // TRACE_BLOCK_TOKENS)
        if hash_ids and len(hash_ids) != needed:
            raise InvalidRequestError(
                f"{where}: hash_ids: must be {needed} for an input_length of {length}, one for each "
                f"{TRACE_BLOCK_TOKENS} tokens; there are {len(hash_ids)}"
            )
        stamp = row.get("timestamp")
        if not isinstance(stamp, int | float) or isinstance(stamp, bool) or stamp < 0:
            raise InvalidRequestError(f"{where}: timestamp: must be milliseconds, is {stamp!r}")
        return RecordedRequest(
            input_tokens=length,
            output_tokens=_count(where, row, "output_length"),
            hash_ids=hash_ids,
            arrival_s=stamp / 1e3,
        )
    output = _count(where, row, "output_tokens") if "output_tokens" in row else None
    if "token_ids" in row:
        ids = _whole_numbers(where, row, "token_ids")
        if not ids:
            raise InvalidRequestError(f"{where}: token_ids: must not be empty")
        return RecordedRequest(token_ids=ids, output_tokens=output)
    return RecordedRequest(text=_text(where, row), output_tokens=output)


def _text(where: str, row: dict[str, Any]) -> str:
    for name in TEXT_FIELDS:
        if name in row:
            if not isinstance(row[name], str) or not row[name]:
                raise InvalidRequestError(f"{where}: {name}: must be a text that is not empty")
            return str(row[name])
    turns = row.get("turns")
    if turns is None:
        raise InvalidRequestError(
            f"{where}: has no prompt: give {', '.join(TEXT_FIELDS)}, turns, token_ids, or input_length of a trace"
        )
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
        raise InvalidRequestError(f"{where}: turns: must be a list that begins with a text")
    return turns[0]


def _count(where: str, row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequestError(f"{where}: {name}: must be a whole number of at least 1, is {value!r}")
    return value


def _whole_numbers(where: str, row: dict[str, Any], name: str) -> tuple[int, ...]:
    value = row[name]
    if not isinstance(value, Sequence) or not all(isinstance(v, int) and v >= 0 for v in value):
        raise InvalidRequestError(f"{where}: {name}: must be a list of whole numbers that are not negative")
    return tuple(value)
