"""What the public APIs have in common: gRPC and HTTP are two ways to call this."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config.schema import RouterSection
from pdserve.errors import InvalidRequestError, NotFoundError
from pdserve.lifecycle import RequestState
from pdserve.store.requests import RequestRecords
from router.prompts import Prompts
from router.request import Request
from router.requests import RequestTable
from router.validation import CheckedRequest, GenerationSpec, Limits, check_request_id, resolve
from router.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the router itself knows of the model."""

    name: str
    vocab_size: int
    """Ids below it are valid: rows of the embedding."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """Where a request is, or how it ended. Fields are explained in inference.proto, `RequestInfo`."""

    request_id: str
    state: RequestState
    attempt: int
    router_id: str
    prefill_worker: str
    decode_worker: str
    num_prompt_tokens: int
    num_output_tokens: int
    error_code: str = ""


class RouterCore:
    """Admission, checks and state of requests. Knows no wire format but that of the request itself."""

    def __init__(
        self,
        *,
        model: ServedModel,
        prompts: Prompts,
        table: RequestTable,
        pool: WorkerPool,
        records: RequestRecords,
        config: RouterSection,
    ) -> None:
        self.model = model
        self.prompts = prompts
        self.config = config
        self._table = table
        self._pool = pool
        self._records = records

    @property
    def ready(self) -> bool:
        """Whether a new request would find workers."""
        return not self._table.closed and self._pool.has_usable_pair

    @property
    def draining(self) -> bool:
        """Whether nobody is admitted any more."""
        return self._table.closed

    @property
    def max_model_len(self) -> int:
        """Longest sequence that can be served now, prompt and output, in tokens."""
        limits = self.limits()
        return min(limits.max_model_len, limits.decode_tokens or limits.max_model_len)

    def limits(self) -> Limits:
        """What a request is checked against."""
        kv = self._pool.limits()
        return Limits(
            model=self.model.name,
            vocab_size=self.model.vocab_size,
            max_model_len=self.model.max_model_len,
            prefill_tokens=kv.prefill_tokens,
            decode_tokens=kv.decode_tokens,
        )

    def admit(self, request_id: str, *, received_at: float, client_s: float | None = None) -> Request:
        """A new request, which the caller must end. `received_at` is `time.monotonic()`, `client_s` what the client
        still waits.

        Raises UnavailableError, OverloadedError or AlreadyExistsError.
        """
        limit_s = self.config.default_deadline_s
        deadline = received_at + (limit_s if client_s is None else min(client_s, limit_s))
        return self._table.admit(request_id, received_at=received_at, deadline=deadline)

    async def resolve(self, checked: CheckedRequest) -> GenerationSpec:
        """Tokenize, and check lengths. Raises InvalidRequestError."""
        prompt_ids = await self.prompts.encode(checked.prompt)
        return resolve(
            checked,
            prompt_ids,
            eos_token_ids=self.model.eos_token_ids,
            limits=self.limits(),
            config=self.config,
        )

    def cancel(self, request_id: str) -> bool:
        """Stop an active request of this router. False if there is none of that name."""
        active = self._table.get(request_id)
        if active is None:
            return False
        active.cancel(f"request {request_id} was cancelled")
        return True

    async def status_of(self, request_id: str) -> RequestStatus:
        """Of a request that runs or ended recently. Raises InvalidRequestError, NotFoundError or StoreError."""
        if not request_id:
            raise InvalidRequestError("request_id: must not be empty", field="request_id")
        check_request_id(request_id)
        active = self._table.get(request_id)
        if active is not None:
            return RequestStatus(
                request_id=request_id,
                state=active.state,
                attempt=active.attempt_number,
                router_id=self._table.router_id,
                prefill_worker=active.prefill_worker,
                decode_worker=active.decode_worker,
                num_prompt_tokens=active.num_prompt_tokens,
                num_output_tokens=active.num_output_tokens,
            )
        record = await self._records.get(request_id)
        if record is None:
            raise NotFoundError(f"request_id: no request {request_id!r} runs or ended recently", field="request_id")
        return RequestStatus(
            request_id=request_id,
            state=record.state,
            attempt=record.attempt,
            router_id=record.owner,
            prefill_worker=record.prefill_worker,
            decode_worker=record.decode_worker,
            num_prompt_tokens=record.num_prompt_tokens,
            num_output_tokens=len(record.output_token_ids),
            error_code=record.error_code,
        )
