"""Puts the responses of one generation together, over all the calls that it takes. No token or text is in it twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.client import responses
from pdserve.client.results import Generation, GenerationDelta, Output
from pdserve.client.tools import ToolCall, ToolCallDelta
from pdserve.errors import InternalError
from pdserve.rpc.codec import finish_from_proto, logprobs_from_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.types import TokenLogprobs


@dataclass(slots=True)
class _Growing:
    """An output that is not complete, or was not when its last response came."""

    num_tokens: int = 0
    """Received so far, those of before an attachment included."""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: dict[int, list[ToolCallDelta]] = field(default_factory=dict)
    """By the number of the call."""
    result: Output | None = None

    def tool_calls(self) -> tuple[ToolCall, ...]:
        """What there is of them."""
        return tuple(
            ToolCall(
                id="".join(delta.id for delta in deltas),
                name="".join(delta.name for delta in deltas),
                arguments="".join(delta.arguments for delta in deltas),
            )
            for _, deltas in sorted(self.calls.items())
        )


class Collector:
    """Outputs as they grow, and how far each has come: the cursor from which a broken stream goes on."""

    def __init__(self, request_id: str, num_outputs: int, received_tokens: tuple[int, ...] = ()) -> None:
        """`num_outputs`: how many are expected. `received_tokens`: of those before, which will not be in the result."""
        self.request_id = request_id
        """Empty until the router has told the name that it made."""
        self._outputs = [_Growing() for _ in range(max(num_outputs, len(received_tokens)))]
        for output, count in zip(self._outputs, received_tokens, strict=False):
            output.num_tokens = count
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_prompt_logprobs_of_call = 0
        self._num_deltas = 0
        self.num_tokens = 0
        """Received in all calls, of all outputs."""

    @property
    def begun(self) -> bool:
        """Whether any token has been received."""
        return self.num_tokens > 0

    @property
    def cursor(self) -> tuple[int, ...]:
        """Tokens received of each output."""
        return tuple(output.num_tokens for output in self._outputs)

    @property
    def complete(self) -> bool:
        """Whether every output has ended."""
        return all(output.result is not None for output in self._outputs)

    def start_call(self) -> None:
        """The responses to come are of another call. It begins at the cursor; what the client got of the prompt may
        come again."""
        self._num_prompt_logprobs_of_call = 0

    def add(self, response: pb.GenerateResponse) -> GenerationDelta | None:
        """Take the next response; None if nothing of it is new. Raises InternalError if it does not follow."""
        self.request_id = self.request_id or response.request_id
        while response.index >= len(self._outputs):
            # Of a request that somebody else made, only the responses tell how many outputs it has.
            self._outputs.append(_Growing())
        output = self._outputs[response.index]
        num_new = len(response.token_ids)
        if response.num_tokens != output.num_tokens + num_new or (output.result is not None and num_new):
            raise InternalError(
                f"the router sent {num_new} tokens, up to number {response.num_tokens} of output {response.index}, "
                f"after {output.num_tokens}"
            )
        reason = finish_from_proto(response.finish_reason)
        prompt_logprobs = self._new_of_prompt(response) if response.HasField("prompt_logprobs") else ()
        if output.result is not None:
            return None
        logprobs = logprobs_from_proto(response.logprobs) if response.HasField("logprobs") else ()
        output.num_tokens += num_new
        self.num_tokens += num_new
        output.texts.append(response.text_delta)
        output.token_ids.extend(response.token_ids)
        output.logprobs.extend(logprobs)
        calls = responses.tool_calls(response)
        for call in calls:
            output.calls.setdefault(call.index, []).append(call)
        if reason is not None:
            output.result = Output(
                index=response.index,
                text="".join(output.texts),
                token_ids=tuple(output.token_ids),
                finish_reason=reason,
                matched_stop=responses.matched_stop(response),
                usage=responses.usage(response.usage),
                timings=responses.timings(response.timings),
                placement=responses.placement(response.placement),
                logprobs=tuple(output.logprobs),
                tool_calls=output.tool_calls(),
            )
        self._num_deltas += 1
        return GenerationDelta(
            request_id=self.request_id,
            seq=self._num_deltas - 1,
            text=response.text_delta,
            token_ids=tuple(response.token_ids),
            index=response.index,
            num_tokens=output.num_tokens,
            finish_reason=reason,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            tool_calls=calls,
        )

    def result(self) -> Generation:
        """The generation, once the stream has ended. Raises InternalError if the router broke its promise of one."""
        outputs = tuple(output.result for output in self._outputs if output.result is not None)
        if len(outputs) < len(self._outputs):
            raise InternalError("the router ended the stream without a finish reason")
        return Generation(request_id=self.request_id, outputs=outputs, prompt_logprobs=tuple(self._prompt_logprobs))

    def _new_of_prompt(self, response: pb.GenerateResponse) -> tuple[TokenLogprobs, ...]:
        if response.index:
            return ()  # every output brings those of the one prompt
        logprobs = logprobs_from_proto(response.prompt_logprobs)
        known = max(0, len(self._prompt_logprobs) - self._num_prompt_logprobs_of_call)
        self._num_prompt_logprobs_of_call += len(logprobs)
        new = logprobs[known:]
        self._prompt_logprobs.extend(new)
        return new
