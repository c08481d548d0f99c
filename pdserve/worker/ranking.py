"""In what order a worker computes prompts: shortest remaining prompt first, with priorities and ageing.

Each step takes its tokens from the prompts with the smallest

    rank = tokens left to compute + AGEING * tokens that this worker had computed when it came + level * priority

Long prompts are cut at the step's budget and the next step is planned anew, so a short prompt waits for at most one
step of a long one. Nobody starves: a prompt that comes after the worker has computed another L / AGEING tokens ranks
behind one that came with L, however short it is. So a prompt of L tokens may be overtaken by what comes while the
worker computes 4 L tokens, and by nothing later.

A level of priority is worth as much as the longest prompt that the model takes: of two that come together the one of
the smaller priority goes first, however long it is. It ages like the rest. A prompt is overtaken by those that are k
levels more urgent while the worker computes k * level / AGEING tokens more, and by nothing later.

The measure is work, not time: it means the same on a slow machine and on a fast one, and the same events give the same
order. What is computed does not depend on it.
"""

from __future__ import annotations

from typing import Protocol

from pdserve.types import GenerationJob

AGEING = 0.25
"""Weight of the work done before a prompt came. Larger is nearer to first come, first served: fairer to long prompts
and to those of low priority, and slower on average."""


class Ranked(Protocol):
    """A prompt, as far as its place in the order depends on it."""

    @property
    def job(self) -> GenerationJob:
        """What it belongs to."""

    @property
    def num_left(self) -> int:
        """Tokens that no step has covered yet."""

    @property
    def work_at_arrival(self) -> int:
        """Tokens of prompts that the worker had computed when it came."""

    @property
    def number(self) -> int:
        """Of its arrival: the smaller came first."""


class Ranking:
    """The order of one worker's prompts."""

    def __init__(self, longest_prompt: int) -> None:
        """`longest_prompt` in tokens."""
        self._level = longest_prompt

    def __call__(self, prompt: Ranked) -> tuple[float, int]:
        """Smaller goes first; ties go to who came first."""
        rank = prompt.num_left + AGEING * prompt.work_at_arrival + self._level * prompt.job.priority
        return rank, prompt.number
