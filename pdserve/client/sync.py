"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from pdserve.client import responses
from pdserve.client.requests import GenerateOptions, detokenize_request, generate_request, tokenize_request
from pdserve.client.results import ClusterStatus, Generation, GenerationDelta, Model, RequestInfo
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc as rpc

DEFAULT_ADDRESS = "127.0.0.1:50051"

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class StreamCall(Protocol):
    """What the stream needs of a gRPC server-stream call."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> bool: ...


class GenerationStream:
    """A running generation: iterate over its deltas, then ask for `result()`. Closing it early cancels the request.

    Use it as a context manager, so that a `break` or an exception in the loop reaches the cluster.
    """

    def __init__(self, call: StreamCall, address: str, timeout_s: float | None) -> None:
        self._call = call
        self._address = address
        self._timeout_s = timeout_s
        self._builder = responses.GenerationBuilder()
        self._closed = False

    def __iter__(self) -> Iterator[GenerationDelta]:
        return self

    def __next__(self) -> GenerationDelta:
        """Raises the PdServeError with which the request failed."""
        if self._closed:
            raise StopIteration
        try:
            return self._builder.add(next(self._call))
        except StopIteration:
            self._closed = True
            self._builder.finished()
            raise
        except grpc.RpcError as error:
            self._closed = True
            raise responses.error_of_call(error, self._address, self._timeout_s) from error

    def result(self) -> Generation:
        """The whole generation; waits for what has not been read yet. Raises as iterating does."""
        for _ in self:
            continue
        return self._builder.finished()

    def close(self) -> None:
        """Cancel the request if it still runs, and end the iteration. Harmless when repeated."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """Talks to a router. One instance may be shared by threads.

    >>> with Client("127.0.0.1:50051") as client:
    ...     print(client.generate("The capital of France is", max_tokens=8).text)

    Every method raises a PdServeError of `pdserve.errors` when the call fails.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, timeout_s: float | None = None) -> None:
        """`timeout_s` bounds every call that gives no time-out itself. Default: the router's own deadline."""
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=list(CHANNEL_OPTIONS))
        self._inference = rpc.InferenceStub(self._channel)
        self._cluster = rpc.ClusterStub(self._channel)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Generate from a prompt (or `messages=`, or `token_ids=`) and wait for all of it."""
        with self.stream(prompt, **options) as stream:
            return stream.result()

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Generate and hand over the text as it comes."""
        request = generate_request(prompt, options)
        timeout_s = options.get("timeout_s", self._timeout_s)
        call = self._inference.Generate(request, timeout=timeout_s)
        return GenerationStream(call, self.address, timeout_s)

    def cancel(self, request_id: str) -> bool:
        """Stop a request of this router. False if nothing was running under that name."""
        return self._call(self._inference.Cancel, pb.CancelRequest(request_id=request_id)).cancelled

    def get_request(self, request_id: str) -> RequestInfo:
        """State of a request that runs or ended recently. Raises NotFoundError."""
        return responses.request_info(
            self._call(self._inference.GetRequest, pb.GetRequestRequest(request_id=request_id))
        )

    def models(self) -> tuple[Model, ...]:
        """Models that can be asked for."""
        answer = self._call(self._inference.ListModels, pb.ListModelsRequest())
        return tuple(responses.model(m) for m in answer.models)

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a text or of a chat, as `generate` would make them."""
        request = tokenize_request(text, messages, add_special_tokens)
        return tuple(self._call(self._inference.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool | None = None) -> str:
        """Text of token ids."""
        return self._call(self._inference.Detokenize, detokenize_request(token_ids, skip_special_tokens)).text

    def status(self) -> ClusterStatus:
        """Workers that the router knows, with their load."""
        return responses.cluster_status(self._call(self._cluster.GetStatus, pb.GetStatusRequest()))

    def close(self) -> None:
        """Close the connection; what still runs on it is cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT], request: RequestT) -> ResponseT:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise responses.error_of_call(error, self.address, self._timeout_s) from error
