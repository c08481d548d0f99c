"""The main function of a worker process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Protocol

from pdserve.service import Service, run_service
from pdserve.worker.host import WorkerHost


class WorkerService(Service, Protocol):
    """A service built round a `WorkerHost`."""

    @property
    def host(self) -> WorkerHost:
        """Its surroundings."""


def run_worker(make: Callable[[], WorkerService]) -> int:
    """Run a worker to its end. Returns the exit code, or ends the process with it."""
    made: list[WorkerService] = []

    def make_and_keep() -> WorkerService:
        made.append(make())
        return made[-1]

    code = run_service(make_and_keep)
    if any(service.host.engine_left_behind for service in made):
        # The interpreter cannot be taken down under a thread that is inside a compute library: that aborts the process.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
