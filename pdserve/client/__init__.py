"""Client library of the public gRPC API: typed, with and without asyncio, and without torch."""

from pdserve.client.aio import AsyncClient
from pdserve.client.aio_stream import AsyncGenerationStream
from pdserve.client.endpoints import DEFAULT_ADDRESS, Tls
from pdserve.client.options import GenerateOptions, JsonValue, Message, SchemaModel
from pdserve.client.parsing import OutputFormatError
from pdserve.client.results import (
    ClusterStatus,
    Generation,
    GenerationDelta,
    Model,
    Output,
    Placement,
    QueueState,
    RequestInfo,
    Timings,
    Usage,
    WorkerState,
)
from pdserve.client.retries import NO_RETRIES, RetryPolicy
from pdserve.client.sync import Client
from pdserve.client.sync_stream import GenerationStream
from pdserve.client.tools import Tool, ToolCall, ToolCallDelta
from pdserve.types import FinishReason, TokenLogprobs

__all__ = [
    "DEFAULT_ADDRESS",
    "NO_RETRIES",
    "AsyncClient",
    "AsyncGenerationStream",
    "Client",
    "ClusterStatus",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "GenerationDelta",
    "GenerationStream",
    "JsonValue",
    "Message",
    "Model",
    "Output",
    "OutputFormatError",
    "Placement",
    "QueueState",
    "RequestInfo",
    "RetryPolicy",
    "SchemaModel",
    "Timings",
    "Tls",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "WorkerState",
]
