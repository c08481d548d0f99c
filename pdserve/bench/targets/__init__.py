"""Servers that can be measured."""

from pdserve.bench.targets.grpc import GrpcTarget
from pdserve.bench.targets.openai import OpenAiTarget
from pdserve.bench.targets.target import OnTokens, QueueSample, Target

__all__ = ["GrpcTarget", "OnTokens", "OpenAiTarget", "QueueSample", "Target"]
