"""The outputs of one prompt: which of them somebody still waits for, and with what token each begins.

To the router each is a request of its own, which it may cancel or try again alone; the prompt is computed, and its KV
handed over, once for all of them. A job without forks has one branch, itself.
"""

from __future__ import annotations

from kv_transfer.messages import ENDED
from pdserve.types import GenerationJob, HandoffId


class Branches:
    """All branches of a job, in their order. A branch is open until it has ended for its router."""

    def __init__(self, job: GenerationJob) -> None:
        jobs = job.branches
        self._open = {HandoffId(branch.request_id, branch.attempt): branch for branch in jobs}
        self.keys = tuple(self._open)
        self._first_tokens: dict[HandoffId, int] = {}

    @property
    def open(self) -> tuple[tuple[HandoffId, GenerationJob], ...]:
        """Those that somebody waits for."""
        return tuple(self._open.items())

    @property
    def are_over(self) -> bool:
        """Whether nobody waits for any of them."""
        return not self._open

    @property
    def are_drawn(self) -> bool:
        """Whether those that were open then have their first token."""
        return bool(self._first_tokens)

    def draw(self, key: HandoffId, token_id: int) -> None:
        """A branch goes on with this token, unless it is closed then."""
        self._first_tokens[key] = token_id

    def close(self, *keys: HandoffId) -> None:
        """These have ended, or are not wanted any more."""
        for key in keys:
            self._open.pop(key, None)

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """What the decode worker is to be told, see `kv_transfer.messages.Commit`."""
        return tuple(self._first_tokens[key] if key in self._open else ENDED for key in self.keys)
