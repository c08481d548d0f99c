"""The vocabulary of the prefill scheduler: a job's states, and what the scheduler asks its surroundings to do."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.block_hash import BlockHashes
from pdserve.errors import OverloadedError, PdServeError
from pdserve.types import DecodeTarget, GenerationJob, HandoffId, PrefixHolder
from pdserve.worker.events import JobFailed, PrefillEvent
from prefill_worker.branches import Branches
from prefill_worker.fetch_book import Fetch


class JobState(enum.Enum):
    """Where a job is, and who owns its KV blocks."""

    QUEUED = "queued"
    """Waits for blocks of this worker, or for a decode worker that was busy. Owns nothing."""
    FETCHING = "fetching"
    """Waits for the KV of its beginning, which another worker sends. Owns nothing: the blocks belong to the fetch, and
    are in the prefix cache when it is over."""
    RESERVING = "reserving"
    """Owns its blocks here; a decode worker has been asked for room. Nothing is computed yet."""
    READY = "ready"
    """Owns its blocks here and, unless it ends with its first token, a reservation at the decode worker."""
    COMPUTING = "computing"
    """As READY, and some of the prompt is computed or in the step that runs. If the decode worker is lost, the next one
    is asked for room meanwhile."""
    COMMITTING = "committing"
    """The first token is out; the decode worker is taking over. This worker owns its blocks until it has."""
    REHOMING = "rehoming"
    """The decode worker was lost before it took over: the KV is here, and another one has been asked for room."""
    PARKED = "parked"
    """As REHOMING, but all were busy and the next round of asking has not begun."""
    ENDING = "ending"
    """Over for the router. The blocks are still here because a step computes into them or a hand-off reads them."""


WAITING_STATES = frozenset({JobState.QUEUED, JobState.FETCHING, JobState.RESERVING})
RUNNABLE_STATES = frozenset({JobState.READY, JobState.COMPUTING})


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One submitted job and its progress."""

    job: GenerationJob
    branches: Branches
    router_id: str
    """The router whose session it came by; it gets the events."""
    hashes: BlockHashes
    arrived_at: float
    number: int
    """Of its arrival: the smaller came first."""
    work_at_arrival: int
    """Tokens that this worker had computed when it came."""
    candidates: Candidates
    state: JobState = JobState.QUEUED
    not_before: float = 0.0
    """QUEUED, PARKED: when to ask decode workers again. FETCHING: when to wait no longer."""
    holders: Sequence[PrefixHolder] = ()
    """Whom to ask for the KV of its beginning; empty once that has been decided."""
    num_local: int = 0
    """Leading tokens that were in the prefix cache before it waited for others."""
    num_brought: int = 0
    """Leading tokens that were there because it had waited."""
    fetching_since: float = 0.0
    fetch_s: float = 0.0
    """How long it has waited for them."""
    target: DecodeTarget | None = None
    """Decode worker with a reservation of this job, or asked for one."""
    num_computed: int = 0
    """Leading tokens whose KV is in its blocks, those found in the prefix cache included."""
    num_cached: int = 0
    """Those found there, when it got its blocks."""
    num_fetched: int = 0
    """Those of them that came from another worker while it waited."""
    started_at: float = 0.0
    compute_s: float = 0.0
    """Its part of the steps that it was in, by tokens."""
    first_token_at: float = 0.0
    failure: JobFailed | None = None
    """ENDING: what to tell the router of each open branch once nothing is held any more."""

    @property
    def key(self) -> HandoffId:
        """Its name, which is that of its first branch."""
        return HandoffId(self.job.request_id, self.job.attempt)

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill, and whose KV is handed over."""
        return self.job.num_known_tokens

    @property
    def num_left(self) -> int:
        """Tokens that no step has covered yet."""
        return self.num_tokens - self.num_computed

    @property
    def needs_handoff(self) -> bool:
        """False if the first token is also the last."""
        return self.job.num_remaining_tokens > 1


@dataclass(slots=True)
class Candidates:
    """The decode workers of a job, in the router's order, and what they have said so far."""

    targets: Sequence[DecodeTarget]
    failed: set[DecodeTarget] = field(default_factory=set)
    """Lost, or unwilling for good."""
    busy: dict[DecodeTarget, float] = field(default_factory=dict)
    """Busy in this round, with the wait each of them asked for, in seconds."""
    last_error: PdServeError = field(default_factory=lambda: OverloadedError("no decode worker has room"))
    last_target: DecodeTarget | None = None
    num_rounds: int = 0
    """In which all of them were asked."""

    def next(self) -> DecodeTarget | None:
        """Whom to ask now; None if nobody is left in this round."""
        return next((t for t in self.targets if t not in self.failed and t not in self.busy), None)

    def note(self, target: DecodeTarget, error: PdServeError) -> None:
        """`target` has refused or failed with `error`."""
        self.last_error, self.last_target = error, target
        if isinstance(error, OverloadedError):
            self.busy[target] = error.retry_after_s if error.retry_after_s is not None else DEFAULT_RETRY_S
        else:
            self.failed.add(target)

    def end_round(self) -> float | None:
        """Seconds until the first busy one may be asked again; None if there is none. Begins a new round."""
        wait = min(self.busy.values(), default=None)
        self.busy.clear()
        self.num_rounds += 1
        return wait


DEFAULT_RETRY_S = 0.1
"""Pause before a decode worker that was busy, and did not say for how long, is asked again."""


# What the scheduler asks for ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Ask for the prefix of a job. Answered by `fetch_ended`, unless it is called off."""

    key: HandoffId
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class AbandonFetch:
    """Call a fetch off."""

    fetch: HandoffId


@dataclass(frozen=True, slots=True)
class Reserve:
    """Begin a hand-off to `target` and ask it for room. Answered by `reserved` or `handoff_failed`."""

    key: HandoffId
    target: DecodeTarget


@dataclass(frozen=True, slots=True)
class Advance:
    """The KV of the first `num_tokens` tokens is final. May come before the decode worker has granted room."""

    key: HandoffId
    num_tokens: int
    step_tokens: int = 0
    """Leading tokens whose KV will be when the running step is over; 0 if none is reported of."""
    step_layers: int = 0
    """Leading layers in which it is by now."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Complete the hand-off. Answered by `committed` or `handoff_failed`."""

    key: HandoffId
    first_tokens: tuple[int, ...]
    """One for each branch; see `kv_transfer.messages.Commit`."""


@dataclass(frozen=True, slots=True)
class AbortHandoff:
    """Call the hand-off off. Answered by `handoff_closed` once nothing reads the blocks any more."""

    key: HandoffId


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell the router. Events of one call of the scheduler to one router go out together."""

    router_id: str
    event: PrefillEvent


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing is left of the job."""

    key: HandoffId


Action = Forget | StartFetch | AbandonFetch | Reserve | Advance | Commit | AbortHandoff | Emit


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Tokens [start, start + length) of one job, to be computed in the next step."""

    key: HandoffId
    start: int
    length: int
    is_last: bool
    """Whether the first token of each branch is drawn after it."""
