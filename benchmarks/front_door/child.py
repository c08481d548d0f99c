"""The parent's side of a process that answers a JSON object a line; `serve` is the child's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Child:
    """`python -m MODULE SETTINGS`, running while the context is open."""

    def __init__(self, module: str, settings: dict[str, Any]) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """What the child's handler of that name returns. Raises RuntimeError if it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # The missing answer says so.
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with {self._process.wait()}; see its errors above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


async def serve(handlers: dict[str, Handler]) -> None:
    """Answer the parent until it closes our standard input. Work may go on between its commands."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        arguments = json.loads(line)
        answer = await handlers[arguments.pop("command")](arguments)
        print(json.dumps(answer), flush=True)
