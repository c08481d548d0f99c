"""Gives spans to an OpenTelemetry collector. The only module that needs the extra `otel`."""

from __future__ import annotations

from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import pdserve
from pdserve.telemetry.context import TraceContext
from pdserve.telemetry.spans import SpanRecord, clock_offset, unix_ns

EXPORT_DELAY_MS: Final = 1000
"""Longest that a span waits for others to be sent with."""

CLOSE_TIMEOUT_S: Final = 3


class OtlpSink:
    """A thread of the SDK sends batches; what does not fit into its queue is dropped."""

    def __init__(self, exporter: SpanExporter, *, service: str, instance: str) -> None:
        """`service` and `instance` are who makes the spans: its role, and its name."""
        self._resource = Resource.create(
            {"service.name": service, "service.instance.id": instance, "service.version": pdserve.__version__}
        )
        self._scope = InstrumentationScope("pdserve", pdserve.__version__)
        self._processor = BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_DELAY_MS)

    def export(self, span: SpanRecord) -> None:
        """See SpanSink."""
        offset = clock_offset()
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=_as_sdk(span.context, remote=False),
                parent=None if span.parent is None else _as_sdk(span.parent, remote=True),
                resource=self._resource,
                attributes=dict(span.attributes) | ({"error.type": span.error} if span.error else {}),
                events=[
                    Event(event.name, dict(event.attributes), timestamp=unix_ns(event.at, offset))
                    for event in span.events
                ],
                links=[Link(_as_sdk(link, remote=True)) for link in span.links],
                kind=SpanKind.SERVER if span.serves else SpanKind.INTERNAL,
                instrumentation_scope=self._scope,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
                start_time=unix_ns(span.start, offset),
                end_time=max(unix_ns(span.end, offset), unix_ns(span.start, offset)),
            )
        )

    def close(self) -> None:
        """See SpanSink."""
        self._processor.force_flush(CLOSE_TIMEOUT_S * 1000)
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves its type out


def make_exporter(endpoint: str, protocol: str) -> SpanExporter:
    """`endpoint` is a URL; headers, certificates and compression are taken from the variables OTEL_EXPORTER_OTLP_*."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")


def _as_sdk(context: TraceContext, *, remote: bool) -> SpanContext:
    return SpanContext(
        context.trace_id, context.span_id, is_remote=remote, trace_flags=TraceFlags(int(context.sampled))
    )
