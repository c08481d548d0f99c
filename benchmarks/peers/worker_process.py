"""The parent's side of a peer that runs as a process of its own, for libraries that are loaded into Python.

Its own process, as their thread pools and memory would disturb ours; it sleeps on a pipe between measurements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.workloads import PeerError, Prefill, Samples, Workload

WARM_UP = ({"kind": "prefill", "tokens": 32}, {"kind": "decode", "batch": 2, "context": 32, "steps": 2})


class WorkerProcess:
    """Implements `Contestant` by a script that calls `worker_protocol.serve`."""

    def __init__(
        self,
        name: str,
        script: Path,
        arguments: Sequence[str],
        *,
        python: Path | None = None,
        environment: Mapping[str, str],
    ) -> None:
        """`environment` is added to ours; `python` is the interpreter to run it with, ours if None."""
        self._name = name
        self._command = [str(python or sys.executable), str(script), *arguments]
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[str] | None = None
        # A file, as nobody reads a pipe while the peer computes.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`

    @property
    def name(self) -> str:
        """See `Contestant`."""
        return self._name

    def prepare(self) -> None:
        """See `Contestant`."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                env=self._environment,
            )  # fmt: skip
            self._answer()
            for request in WARM_UP:
                self._ask(request)

    def measure(self, workloads: Sequence[Workload]) -> Samples:
        """See `Contestant`."""
        samples: Samples = {}
        for w in workloads:
            kind = "prefill" if isinstance(w, Prefill) else "decode"
            samples[w] = [float(self._ask({"kind": kind, **asdict(w)})["tokens_per_s"])]
        return samples

    def close(self) -> None:
        """End the process by ending its input."""
        if self._process is not None:
            with suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None
        self._errors.close()

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        # If it has ended, the missing answer says so, with its last words.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait()
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["no message"]
            raise PeerError(f"{Path(self._command[1]).name} ended with {process.returncode}: {last[0]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
