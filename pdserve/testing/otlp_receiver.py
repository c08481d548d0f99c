"""A collector of OpenTelemetry traces in this process: the real service, over gRPC, that keeps what it gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """As the collector knows it."""

    service: str
    span: Span

    @property
    def name(self) -> str:
        """Of the span."""
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        """Its values, whatever their types."""
        return {entry.key: _value(entry) for entry in self.span.attributes}


class OtlpReceiver(pb_grpc.TraceServiceServicer):
    """See `receiving`."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.num_exports = 0
        self.address = ""
        """host:port."""

    def Export(  # noqa: N802
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        """Keep it. Called in a thread of the server's."""
        self.num_exports += 1
        for resource in request.resource_spans:
            names = {entry.key: _value(entry) for entry in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [ReceivedSpan(names["service.name"], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def named(self, name: str) -> Iterator[ReceivedSpan]:
        """Those of one name."""
        return (one for one in self.spans if one.name == name)


@contextlib.contextmanager
def receiving() -> Iterator[OtlpReceiver]:
    """A collector that listens on a free port, outside the event loop: a busy loop must not look like a slow one."""
    receiver, server = OtlpReceiver(), grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]  # made without
    receiver.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()


def _value(entry: KeyValue) -> Any:
    kind = entry.value.WhichOneof("value")
    return None if kind is None else getattr(entry.value, kind)
