"""What one body asks for, as its answer shows it: choices, and what has come of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.types import FinishReason
from router.generation import Generation
from router.http.plans import Plan
from router.output import Ending
from router.reader import Response
from router.stream import Delta
from router.validation import CheckedRequest, GenerationSpec, TextInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One output of a body."""

    index: int
    prompt_index: int
    checked: CheckedRequest
    spec: GenerationSpec

    @property
    def prompt_text(self) -> str | None:
        """As the client wrote it; None if it sent something else than text."""
        return self.checked.prompt.text if isinstance(self.checked.prompt, TextInput) else None


def choices_of(generation: Generation) -> Sequence[Choice]:
    """By index. Once it has begun."""
    ask = generation.ask
    return [
        Choice(
            index=index,
            prompt_index=index // ask.num_outputs,
            checked=ask.prompts[index // ask.num_outputs],
            spec=spec,
        )
        for index, spec in enumerate(generation.specs)
    ]


def shown(plan: Plan, response: Response) -> Response:
    """What is to be seen of a response: without its output if only the prompt counts."""
    if not plan.score_only:
        return response
    summary = response.summary
    if summary is not None:
        summary = replace(summary, ending=Ending(FinishReason.LENGTH), num_output_tokens=0)
    return Response(response.index, 0, Delta((), "", prompt_logprobs=response.delta.prompt_logprobs), summary)
