"""A collector of OpenTelemetry traces in this process: the real service, over gRPC or HTTP, that keeps what it gets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
        self.keep(request)
        return pb.ExportTraceServiceResponse()

    def keep(self, request: pb.ExportTraceServiceRequest) -> None:
        """Keep it."""
        self.num_exports += 1
        for resource in request.resource_spans:
            names = {entry.key: _value(entry) for entry in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [ReceivedSpan(names["service.name"], span) for span in scope.spans]

    def named(self, name: str) -> Iterator[ReceivedSpan]:
        """Those of one name."""
        return (one for one in self.spans if one.name == name)


@contextlib.contextmanager
def receiving(protocol: str = "grpc") -> Iterator[OtlpReceiver]:
    """A collector that listens on a free port, outside the event loop: a busy loop must not look like a slow one.
    `protocol`: grpc or http/protobuf."""
    receiver = OtlpReceiver()
    with (_over_grpc if protocol == "grpc" else _over_http)(receiver):
        yield receiver


@contextlib.contextmanager
def _over_grpc(receiver: OtlpReceiver) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]  # made without
    receiver.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def _over_http(receiver: OtlpReceiver) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            if known:
                receiver.keep(pb.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="collector")
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _value(entry: KeyValue) -> Any:
    kind = entry.value.WhichOneof("value")
    return None if kind is None else getattr(entry.value, kind)
