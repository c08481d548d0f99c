"""Errors over gRPC: PdServeError to a rich status and back.

A status carries `google.rpc.ErrorInfo` (domain "pdserve", reason = our code), and where known `RetryInfo` and
`BadRequest`. One interceptor does it for every method of every server, so that no servicer handles errors itself.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from pdserve import errors

log = logging.getLogger(__name__)

DOMAIN = "pdserve"

_STATUS_OF_CODE: dict[str, grpc.StatusCode] = {
    errors.InvalidRequestError.code: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PromptTooLongError.code: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnauthenticatedError.code: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDeniedError.code: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFoundError.code: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExistsError.code: grpc.StatusCode.ALREADY_EXISTS,
    errors.WrongRouterError.code: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OverloadedError.code: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError.code: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerLostError.code: grpc.StatusCode.UNAVAILABLE,
    errors.DrainingError.code: grpc.StatusCode.UNAVAILABLE,
    errors.CapacityError.code: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceededError.code: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.CancelledError.code: grpc.StatusCode.CANCELLED,
    errors.IncompatibleWorkersError.code: grpc.StatusCode.FAILED_PRECONDITION,
    errors.HandoffError.code: grpc.StatusCode.ABORTED,
    errors.StaleAttemptError.code: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StoreError.code: grpc.StatusCode.UNAVAILABLE,
}

_CODE_OF_STATUS: dict[grpc.StatusCode, type[errors.PdServeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.UNIMPLEMENTED: errors.NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
    grpc.StatusCode.CANCELLED: errors.CancelledError,
}


def status_of(error: errors.PdServeError) -> status_pb2.Status:
    """The rich status of an error."""
    code = _STATUS_OF_CODE.get(error.code, grpc.StatusCode.INTERNAL)
    status = status_pb2.Status(code=code.value[0], message=error.message)
    metadata = {k: str(v) for k, v in error.details.items()}
    if error.field is not None:
        metadata["field"] = error.field
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN, metadata=metadata))
    if error.field is not None and status.code == code_pb2.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def error_of(call: grpc.RpcError) -> errors.PdServeError:
    """The error behind a failed call: ours if the status carries one, else the nearest kind by status code."""
    assert isinstance(call, grpc.Call | grpc.aio.AioRpcError)
    message = call.details() or "no details"
    status = None
    try:
        status = rpc_status.from_call(cast(grpc.Call, call))
    except (ValueError, TypeError):
        # A status of a proxy or of another implementation, whose details do not match its code.
        log.debug("status details of %s are not readable", call.code())
    retry_after_s: float | None = None
    ours: error_details_pb2.ErrorInfo | None = None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
            ours = info if info.domain == DOMAIN else ours
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if ours is not None:
        details = dict(ours.metadata)
        field = details.pop("field", None)
        error = errors.error_from_code(ours.reason, message)
        error.field, error.retry_after_s, error.details = field, retry_after_s, details
        return error
    kind = _CODE_OF_STATUS.get(call.code(), errors.InternalError)
    return kind(f"{call.code().name}: {message}", retry_after_s=retry_after_s)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException, method: str) -> NoReturn:
    if not isinstance(error, errors.PdServeError):
        log.error("unexpected error in %s", method, exc_info=error)
        error = errors.InternalError(f"internal error in {method}")
    await context.abort_with_status(rpc_status.to_status(status_of(error)))
    raise AssertionError("abort_with_status returns never")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a servicer raises into a rich status; an unexpected exception is logged once and becomes INTERNAL.

    Bytes that are no message are the caller's error like any other: INVALID_ARGUMENT. To gRPC itself they are a bug of
    the server, with a traceback in its log for each, so messages are read here.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        # The stubs type these functions for the synchronous server; the asyncio server takes coroutines in their place.
        grpc_any: Any = grpc
        if handler.response_streaming:
            stream: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make = (
                grpc_any.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc_any.unary_stream_rpc_method_handler
            )
            wrapped: Any = _guard_stream(stream, method, _reader(handler, method))
        else:
            unary: Any = handler.stream_unary if handler.request_streaming else handler.unary_unary
            make = (
                grpc_any.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc_any.unary_unary_rpc_method_handler
            )
            wrapped = _guard_unary(unary, method, _reader(handler, method))
        result: grpc.RpcMethodHandler[Any, Any] = make(wrapped, None, handler.response_serializer)
        return result


_PASS = (asyncio.CancelledError, grpc.aio.AbortError)


def _client_gone(error: grpc.aio.InternalError, method: str) -> asyncio.CancelledError:
    """For what gRPC raises in a handler whose client is gone: an answer failed before it had noticed that itself."""
    log.debug("the client of %s was gone when it was answered: %s", method, error)
    return asyncio.CancelledError("the client is gone")


def _reader(handler: grpc.RpcMethodHandler[Any, Any], method: str) -> Callable[[Any], Any]:
    """Makes what a servicer is given of what gRPC has: a message of bytes, or a stream of one of the other."""
    deserialize: Any = handler.request_deserializer

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, ValueError) as error:
            raise errors.InvalidRequestError(f"{method}: {len(data)} bytes are no message of it: {error}") from error

    async def read_all(stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in stream:
            yield read(data)

    if deserialize is None:
        return lambda request: request
    return read_all if handler.request_streaming else read


def _guard_stream(stream: Any, method: str, read: Callable[[Any], Any]) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            responses = stream(read(request), context)
            if inspect.isawaitable(responses):
                await responses  # a handler that writes to the context itself
                return
            async for response in responses:
                yield response
        except _PASS:
            raise
        except grpc.aio.InternalError as error:
            raise _client_gone(error, method) from error
        except Exception as error:
            await _abort(context, error, method)

    return streaming


def _guard_unary(unary: Any, method: str, read: Callable[[Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def single(request: Any, context: Any) -> Any:
        try:
            return await unary(read(request), context)
        except _PASS:
            raise
        except grpc.aio.InternalError as error:
            raise _client_gone(error, method) from error
        except Exception as error:
            await _abort(context, error, method)

    return single
