"""Log set-up, called once by each process's main. Modules use `logging.getLogger(__name__)`, facts go into `extra`."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

from pdserve.config.schema import LogSection

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller passed as `extra`."""
    return {k: v for k, v in vars(record).items() if k not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "msg": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One readable line: time, level, process, message, fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"
        fields = "".join(f" {k}={v}" for k, v in _fields(record).items())
        line = f"{clock} {record.levelname:<7} {self._process}: {record.getMessage()}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the time of the record, not to what it was when logging was set up."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(config: LogSection, process: str) -> None:
    """Send the logs of this process to stderr. `process` names it in every line."""
    kind = config.format
    if kind == "auto":
        kind = "text" if sys.stderr.isatty() else "json"
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter(process) if kind == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
