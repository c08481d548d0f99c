"""Every error that input, peers or resources can cause, each with a stable code.

The code is what clients, logs, metrics and redis records see. `retryable` says whether the same request may succeed if
it is tried again, elsewhere or later. Our own bugs are `assert`s, not members of this family.
"""

from __future__ import annotations

from typing import ClassVar


class PdServeError(Exception):
    """Base of all errors of pdserve."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None, **details: str
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        """Path of the input field at fault, if one is."""
        self.retry_after_s = retry_after_s
        """When to try again, if the sender knows."""
        self.details = details
        """More facts for machines: names of peers, of files, of states."""

    @property
    def request_id(self) -> str | None:
        """Name of the request that failed, if the client library reports it."""
        return self.details.get("request_id")


class InvalidRequestError(PdServeError):
    """The request can never be served as it is."""

    code = "invalid_request"


class PromptTooLongError(InvalidRequestError):
    """Prompt and output together exceed what the model or the KV pool can hold."""

    code = "prompt_too_long"


class NotFoundError(PdServeError):
    """No such model or request."""

    code = "not_found"


class AlreadyExistsError(PdServeError):
    """The request id is in use."""

    code = "already_exists"


class UnauthenticatedError(PdServeError):
    """The caller has no key, or none that is known."""

    code = "unauthenticated"


class PermissionDeniedError(PdServeError):
    """The caller is known, and may not do this."""

    code = "permission_denied"


class WrongRouterError(PdServeError):
    """Another router has the request; details name it as `router`."""

    code = "wrong_router"


class OverloadedError(PdServeError):
    """More than whoever asks may have at once, or than one peer takes: a quota, a queue or a pool is full."""

    code = "overloaded"
    retryable = True


class UnavailableError(PdServeError):
    """Nobody can serve this now: no worker, draining, or a peer that does not answer."""

    code = "unavailable"
    retryable = True


class WorkerLostError(UnavailableError):
    """The worker that had the request is gone, and so is what it had computed."""

    code = "worker_lost"


class DrainingError(UnavailableError):
    """The worker is about to end on purpose: it takes nothing new, or gives back what it could not finish in time."""

    code = "draining"


class CapacityError(UnavailableError):
    """The cluster has too much to do to serve this in time; details say why as `reason`."""

    code = "no_capacity"


class PoisonedRequestError(PdServeError):
    """Workers have died while they computed this request, at the same place; it is not given to another one."""

    code = "poisoned_request"


class DeadlineExceededError(PdServeError):
    """The client's deadline passed."""

    code = "deadline_exceeded"


class CancelledError(PdServeError):
    """Stopped by the client or the operator."""

    code = "cancelled"


class IncompatibleWorkersError(PdServeError):
    """Two workers differ in model or KV layout and must not exchange KV."""

    code = "incompatible_workers"


class HandoffError(PdServeError):
    """A hand-off ended without a commit. The request itself can be tried again."""

    code = "handoff_failed"
    retryable = True


class StaleAttemptError(PdServeError):
    """A message of an attempt, ticket or incarnation that has been superseded."""

    code = "stale_attempt"


class ConfigError(PdServeError):
    """The configuration is wrong. The message lists every problem, one per line, with its path."""

    code = "config"


class ModelLoadError(PdServeError):
    """The model cannot be loaded; names the file and what is wrong with it."""

    code = "model_load"


class StoreError(PdServeError):
    """Redis does not answer, or answers with something that is not ours."""

    code = "store_unavailable"
    retryable = True


class InternalError(PdServeError):
    """A bug of pdserve that was contained to one request."""

    code = "internal"


def _all_errors(base: type[PdServeError]) -> list[type[PdServeError]]:
    return [base, *(e for sub in base.__subclasses__() for e in _all_errors(sub))]


def error_from_code(code: str, message: str) -> PdServeError:
    """The error a peer reported by `code`; an InternalError for a code this version does not know."""
    by_code = {e.code: e for e in reversed(_all_errors(PdServeError))}
    kind = by_code.get(code, InternalError)
    return (InternalError if kind is PdServeError else kind)(message)
