"""Several outputs of one prompt: one search for workers, one prefill, one transfer of its KV.

That holds for their first attempt only. From there on each output is a request like any other: it ends, is cancelled
and tries again alone, and nothing that happens to it concerns the others.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from pdserve.errors import PdServeError, UnavailableError
from router.admission import Admission
from router.attempt import dispatch_together
from router.request import Request
from router.validation import GenerationSpec
from router.worker_pool import Placement


async def begin_group(requests: Sequence[Request], specs: Sequence[GenerationSpec], admission: Admission) -> None:
    """Claim the ids of all requests, then dispatch them together; those that have ended by then are left out.

    `specs` belong to `requests` one by one and differ in the seed only. Raises AlreadyExistsError if another router has
    one of the ids; then nothing is dispatched.
    """
    claims = (request.claim(spec) for request, spec in zip(requests, specs, strict=True))
    for outcome in await asyncio.gather(*claims, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
    names = await requests[0].name_prompt()
    for request in requests:
        request.use_names(names.fork())
    waiting = [request for request in requests if not request.ended]
    if len(waiting) == 1:
        waiting[0].attempts.place()
    elif waiting:
        _Search(waiting, admission)


class _Search:
    """Waits for the turn of all of its requests, then looks for workers for them, until there are some, time is up, or
    every request has ended."""

    def __init__(self, waiting: Sequence[Request], admission: Admission) -> None:
        self._waiting = list(waiting)
        self._placer = waiting[0].attempts.new_placer(self._dispatch, self._give_up)
        self._admission = admission
        self._turn = waiting[0].attempts.new_turn(len(waiting))
        for request in waiting:
            request.attempts.placed_by_group(self._turn, functools.partial(self._leave, request))
        admission.enter(self._turn, self._look, self._refuse)

    def _look(self) -> None:
        self._placer.search(self._waiting[0].attempts.needs)

    def _leave(self, request: Request) -> None:
        self._waiting = [other for other in self._waiting if other is not request]
        if not self._waiting:
            self._admission.leave(self._turn)
            self._placer.stop()

    def _dispatch(self, placement: Placement) -> None:
        requests = self._take_all()
        lead = requests[0]
        attempts = [
            request.attempts.attempt_on(placement, num_outputs=len(requests), leads=request is lead)
            for request in requests
        ]
        try:
            dispatch_together(attempts)
        except UnavailableError as error:
            for request, attempt in zip(requests, attempts, strict=True):
                request.attempts.not_dispatched(attempt, error)
            return
        for request, attempt in zip(requests, attempts, strict=True):
            request.attempts.dispatched(attempt)

    def _refuse(self, error: PdServeError) -> None:
        for request in self._take_all():
            request.fail(error)

    def _give_up(self) -> None:
        for request in self._take_all():
            request.attempts.no_worker()

    def _take_all(self) -> list[Request]:
        requests, self._waiting = self._waiting, []
        return requests
