"""Writes what the flight recorder of this process remembers to a file: after a crash, or on SIGUSR2."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdserve.telemetry.chrome import ChromeTrace

log = logging.getLogger(__name__)

PREFIX: Final = "pdserve-flight"


class FlightDump:
    """Call it to write one."""

    def __init__(self, name: Callable[[], str], trace: Callable[[], ChromeTrace], directory: str | None) -> None:
        """`name` of the process. `directory`: None for that of temporary files."""
        self._name = name
        self._trace = trace
        self._directory = Path(directory or tempfile.gettempdir())

    def __call__(self, reason: str) -> Path | None:
        """The file, readable by this user alone; None, after logging why, if it cannot be written. Blocks briefly."""
        stamp = time.strftime("%Y%m%dT%H%M%S")
        path = self._directory / f"{PREFIX}-{self._name()}-{os.getpid()}-{stamp}.json"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(self._trace().as_json(), file)
            partial.rename(path)
        except OSError as error:
            log.error("flight recorder not written to %s: %s", path, error)
            return None
        log.warning("flight recorder written", extra={"path": str(path), "reason": reason})
        return path
