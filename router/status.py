"""Where a request is, or how it ended: what GetRequest and GET /v1/requests/{id} say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.lifecycle import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """Fields are explained in inference.proto, `RequestInfo`."""

    request_id: str
    state: RequestState
    attempt: int
    router_id: str
    prefill_worker: str
    decode_worker: str
    num_prompt_tokens: int
    num_output_tokens: int
    error_code: str = ""

    @property
    def refused(self) -> bool:
        """Whether it failed before any worker had it. Its name is free then."""
        return (
            self.state is RequestState.FAILED and self.attempt == 1 and not (self.prefill_worker or self.decode_worker)
        )


_LEAST_ADVANCED_FIRST = (
    RequestState.QUEUED,
    RequestState.PREFILLING,
    RequestState.TRANSFERRING,
    RequestState.DECODING,
    RequestState.FAILED,
    RequestState.CANCELLED,
    RequestState.FINISHED,
)


def combined(request_id: str, outputs: Sequence[RequestStatus], num_prompt_tokens: int) -> RequestStatus:
    """Of a request with several outputs: where the least advanced one is; tokens of all of them; the prompts once."""
    if len(outputs) == 1:
        return outputs[0]
    slowest = min(outputs, key=lambda output: _LEAST_ADVANCED_FIRST.index(output.state))
    return dataclasses.replace(
        slowest,
        request_id=request_id,
        attempt=max(output.attempt for output in outputs),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=sum(output.num_output_tokens for output in outputs),
    )
