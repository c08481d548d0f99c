"""Client library of the public gRPC API: typed, with and without asyncio, and without torch."""

from pdserve.client.aio import AsyncClient, AsyncGenerationStream
from pdserve.client.requests import GenerateOptions
from pdserve.client.results import (
    ClusterStatus,
    Generation,
    GenerationDelta,
    Model,
    Placement,
    RequestInfo,
    Timings,
    Usage,
    WorkerState,
)
from pdserve.client.sync import DEFAULT_ADDRESS, Client, GenerationStream
from pdserve.types import TokenLogprobs

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncClient",
    "AsyncGenerationStream",
    "Client",
    "ClusterStatus",
    "GenerateOptions",
    "Generation",
    "GenerationDelta",
    "GenerationStream",
    "Model",
    "Placement",
    "RequestInfo",
    "Timings",
    "TokenLogprobs",
    "Usage",
    "WorkerState",
]
