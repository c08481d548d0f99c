"""Runs the choices of one body through the core, each as a request of its own, and ends them together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.errors import InternalError, PdServeError
from pdserve.types import FinishReason
from router.core import RouterCore
from router.http.plans import Plan
from router.output import Ending
from router.request import Request
from router.stream import Delta, Response
from router.validation import CheckedRequest, GenerationSpec, TextInput

_NO_OUTPUT: Final = Delta((), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One output of a body."""

    index: int
    prompt_index: int
    checked: CheckedRequest
    request: Request
    spec: GenerationSpec
    score_only: bool

    @property
    def prompt_text(self) -> str | None:
        """As the client wrote it; None if it sent something else than text."""
        return self.checked.prompt.text if isinstance(self.checked.prompt, TextInput) else None

    async def next(self) -> Response:
        """The next response of the request, see `ClientStream.next`."""
        response = await self.request.stream.next()
        return _without_output(response) if self.score_only else response


class Generation:
    """The choices of one body, from admission to the end of the last one."""

    def __init__(self, core: RouterCore, plan: Plan) -> None:
        """Nothing happens before `run`."""
        self.plan = plan
        self.choices: Sequence[Choice] = ()
        """By index; set once `run` has begun."""
        self._core = core
        self._admitted: list[Request] = []

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Admit, tokenize and dispatch all choices; whatever has not ended at the end is cancelled.

        Raises PdServeError with names of the body; then no choice goes on.
        """
        received_at = time.monotonic()
        try:
            wanted = list(self.plan.choices())
            for request_id, _, _ in wanted:
                self._admitted.append(self._core.admit(request_id, received_at=received_at))
            specs = await self._resolve(wanted)
            self.choices = [
                Choice(
                    index=index,
                    prompt_index=prompt_index,
                    checked=checked,
                    request=request,
                    spec=spec,
                    score_only=self.plan.score_only,
                )
                for index, ((_, prompt_index, checked), request, spec) in enumerate(
                    zip(wanted, self._admitted, specs, strict=True)
                )
            ]
            await self._begin()
            yield
        except PdServeError as error:
            self.fail(error)
            raise self.plan.names.renamed(error) from None
        except Exception:
            self.fail(InternalError(f"internal error in request {self.plan.request_id}"))
            raise
        finally:
            self.client_gone()

    def client_gone(self) -> None:
        """Cancel what has not ended. Harmless when repeated."""
        for request in self._admitted:
            request.client_gone()

    def fail(self, error: PdServeError) -> None:
        """End what has not ended with `error`."""
        for request in self._admitted:
            request.fail(error)

    async def _resolve(self, wanted: Sequence[tuple[str, int, CheckedRequest]]) -> list[GenerationSpec]:
        """Choices of one prompt differ in the seed only, so each prompt is tokenized once."""
        specs: list[GenerationSpec] = []
        last_index = -1
        for request, (_, prompt_index, checked) in zip(self._admitted, wanted, strict=True):
            if prompt_index == last_index:
                specs.append(dataclasses.replace(specs[-1], sampling=checked.sampling))
            else:
                try:
                    specs.append(await request.unless_ended(self._core.resolve(checked)))
                except PdServeError as error:
                    raise self.plan.names_of(prompt_index).renamed(error) from None
            last_index = prompt_index
        return specs

    async def _begin(self) -> None:
        """Claim the ids of all choices at once: each is a round trip."""
        begun = [choice.request.unless_ended(choice.request.begin(choice.spec)) for choice in self.choices]
        if len(begun) == 1:
            await begun[0]
            return
        for outcome in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


def _without_output(response: Response) -> Response:
    """What is left of a response when only the prompt counts."""
    delta = dataclasses.replace(_NO_OUTPUT, prompt_logprobs=response.delta.prompt_logprobs)
    summary = response.summary
    if summary is not None:
        summary = dataclasses.replace(summary, ending=Ending(FinishReason.LENGTH), num_output_tokens=0)
    return Response(response.seq, delta, summary)
