"""The main function of a worker process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdserve.service import EXIT_USAGE, Service, end_process, run_service
from pdserve.worker.host import WorkerHost


class WorkerService(Service, Protocol):
    """A service built round a `WorkerHost`."""

    @property
    def host(self) -> WorkerHost:
        """Its surroundings."""


def run_worker(make: Callable[[], WorkerService]) -> int:
    """Run a worker to its end and end the process with its exit code. Returns that of a start that failed."""
    made: list[WorkerService] = []

    def make_and_keep() -> WorkerService:
        made.append(make())
        return made[-1]

    code = run_service(make_and_keep, lambda reason: made[-1].host.flight_dump(reason))
    # An orderly end of the interpreter would abort under a thread that was left behind inside a compute library.
    if code != EXIT_USAGE or any(service.host.engine_left_behind for service in made):
        end_process(code)
    return code
