"""What routers tell workers and workers tell routers, as dataclasses. `codec.py` has the protobuf form.

Every one of them names the request and the attempt it belongs to, as one `HandoffId`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdserve.errors import PdServeError
from pdserve.types import DecodeTarget, FinishReason, GenerationJob, HandoffId, PrefixHolder, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A router introduces itself."""

    router_id: str
    reads_step_batch: bool = False
    """Whether it can be sent what most steps bring as lists side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Prefill this and hand it to one of `targets`, best first."""

    job: GenerationJob
    targets: tuple[DecodeTarget, ...]
    holders: tuple[PrefixHolder, ...] = ()
    """Whom to ask for KV of the job's beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitLocal:
    """To a decode worker: compute this prompt, keep it, and decode on."""

    job: GenerationJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop this attempt; nobody waits for an answer."""

    id: HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """The router is there. Also stands for commands of a newer version that this one does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    """The worker has given the request up and holds nothing of it."""

    id: HandoffId
    code: str
    message: str
    retryable: bool
    """Whether another attempt may succeed."""
    blame: str = ""
    """Worker to leave out of the next attempt."""

    @classmethod
    def of(cls, id: HandoffId, error: PdServeError, *, retryable: bool | None = None, blame: str = "") -> JobFailed:  # noqa: A002
        """From an error; `retryable` overrides what its class says."""
        return cls(
            id=id,
            code=error.code,
            message=error.message,
            retryable=error.retryable if retryable is None else retryable,
            blame=blame,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A command whose requests are known but which makes no sense; the failures are the answer."""

    failures: tuple[JobFailed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate:
    """To a decode worker, in answer to MigrationWanted: give this stream to `target`, where it is `new_attempt`."""

    id: HandoffId
    new_attempt: int
    target: DecodeTarget | None
    """None: nobody could take it."""


PrefillCommand = Hello | Submit | Cancel | KeepAlive | Malformed
DecodeCommand = Hello | SubmitLocal | Migrate | Cancel | KeepAlive | Malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStarted:
    """The first chunk of the prompt goes into the next step."""

    id: HandoffId
    decode_worker: str
    """Empty if the request ends with its first token, unless that worker computes the prompt itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of a part of the prompt, for a job that asked for them."""

    id: HandoffId
    first_index: int
    """Index in the prompt of the first of `tokens`."""
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The prompt is computed and the next token drawn."""

    id: HandoffId
    index: int
    """Its index in the output."""
    token_id: int
    finish_reason: FinishReason | None
    queue_s: float
    prefill_s: float
    cached_tokens: int = 0
    fetched_tokens: int = 0
    """Those of the cached tokens that came from another worker for this request."""
    fetch_s: float = 0.0
    """Part of `queue_s`, spent waiting for them."""
    compute_s: float = 0.0
    """This job's part of the steps that computed it, which others share; 0 if that is not known."""
    logprobs: TokenLogprobs | None = None
    """None if the job did not ask for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOff:
    """The decode worker owns the request."""

    id: HandoffId
    decode_worker: str
    transport: str
    kv_bytes: int
    transfer_s: float
    """From the first token to the last byte stored."""


# Not frozen, as the others are: there is one for each token, and a frozen one takes longer to make.
@dataclass(slots=True, kw_only=True)
class StepTokens:
    """Tokens of one request from one decode step. Nobody changes it."""

    id: HandoffId
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    first_step_s: float
    """Seconds of the request's first step; 0 in later messages."""
    local_prefill_tokens: int
    """Tokens of its prompt that this worker has computed; with one of several outputs of a prompt."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of `token_ids`; empty if the job did not ask for them."""
    num_accepted: int = 0
    """Those of `token_ids` that came without a step of their own, as drafted tokens were right."""
    num_rejected: int = 0
    """Tokens that were drafted in vain."""


class MigrationCause(enum.Enum):
    """Why a stream is to move to another decode worker."""

    DRAIN = "drain"
    """The worker stops before the stream would end."""
    ROOM = "room"
    """It is running out of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationWanted:
    """The stream should go on at another decode worker. Until the router has named one it goes on here."""

    id: HandoffId
    cause: MigrationCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """The target owns the stream, as attempt `new_attempt`."""

    id: HandoffId
    new_attempt: int
    transport: str
    kv_bytes: int
    copy_s: float
    """From the reservation to the commit; the stream went on during most of that."""
    stop_s: float
    """From the last token of this worker to the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationFailed:
    """The stream goes on here, and the target has nothing of attempt `new_attempt`."""

    id: HandoffId
    new_attempt: int
    code: str
    message: str


PrefillEvent = PrefillStarted | PromptLogprobs | FirstToken | HandedOff | JobFailed
DecodeEvent = (
    PrefillStarted | PromptLogprobs | FirstToken | StepTokens | JobFailed | MigrationWanted | Migrated | MigrationFailed
)
