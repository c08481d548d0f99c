"""Whether this process traces, and where its spans go."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

from pdserve.config.schema import TracingSection
from pdserve.errors import ConfigError
from pdserve.telemetry.context import TraceContext, new_trace
from pdserve.telemetry.spans import SpanSink


@dataclass(frozen=True, slots=True)
class Tracing:
    """Of a process that traces; None stands for one that does not."""

    sink: SpanSink
    sample_ratio: float

    def root(self, client: TraceContext | None) -> tuple[TraceContext, TraceContext | None] | None:
        """The span of a new request and its parent, if any; None if it is not to be traced. A client that sends a
        context decides itself."""
        if client is not None:
            return (client.child(), client) if client.sampled else None
        if random.random() >= self.sample_ratio:  # noqa: S311 - chooses samples
            return None
        return new_trace(sampled=True), None


def open_tracing(section: TracingSection, *, service: str, instance: str) -> Tracing | None:
    """As the configuration says or else the environment (OTEL_EXPORTER_OTLP_ENDPOINT and its relatives); None if
    neither names a collector, or OTEL_SDK_DISABLED is true. Raises ConfigError if the extra `otel` is missing."""
    environment = os.environ
    endpoint = (
        section.endpoint
        or environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").removesuffix("/v1/traces")
        or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    )
    if not endpoint or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = section.protocol or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(
            f"tracing.protocol: {protocol!r} is neither grpc nor http/protobuf (OTEL_EXPORTER_OTLP_PROTOCOL)",
            field="tracing.protocol",
        )
    try:
        from pdserve.telemetry.otlp import OtlpSink, make_exporter

        exporter = make_exporter(endpoint, protocol)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracing.endpoint: needs {error.name}; pip install 'pdserve[otel]'", field="tracing.endpoint"
        ) from error
    return Tracing(OtlpSink(exporter, service=service, instance=instance), section.sample_ratio)
