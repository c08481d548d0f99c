"""One output of a request whose client has offered functions."""

from __future__ import annotations

import hashlib

from router.tools.formats import ToolFormat
from router.tools.readers import CallReader
from router.tools.types import CallDelta, Parsed, ToolUse


class ToolOutput:
    """Text in, content and calls out. Knows the calls' ids, which depend on the names of request and output alone: a
    client that comes back for the rest of a stream finds the ones that it knows."""

    def __init__(self, tool_format: ToolFormat, use: ToolUse, request_id: str, output_index: int) -> None:
        self._reader: CallReader = tool_format.reader(use)
        self._name = f"{request_id}-{output_index}"

    @property
    def has_calls(self) -> bool:
        """Whether any has come so far."""
        return self._reader.num_calls > 0

    def push(self, text: str, *, last: bool = False) -> Parsed:
        """More of the output; `last`: nothing comes after it."""
        parsed = self._reader.push(text)
        return parsed + self._reader.finish() if last else parsed

    def call_id(self, call: CallDelta) -> str:
        """Of the call that it is part of."""
        digest = hashlib.blake2b(f"{self._name}:{call.index}".encode(), digest_size=12, person=b"call")
        return f"call_{digest.hexdigest()}"
