"""What both workers compute with: batches, block accounting, engines behind one Protocol. Imports without torch."""

from pdserve.engine.batch import Batch, SampleRequest, SamplingBatch, SequenceChunk, build_batch
from pdserve.engine.block_manager import BlockManager, Blocks
from pdserve.engine.engine import Engine
from pdserve.engine.loader import load_engine

__all__ = [
    "Batch",
    "BlockManager",
    "Blocks",
    "Engine",
    "SampleRequest",
    "SamplingBatch",
    "SequenceChunk",
    "build_batch",
    "load_engine",
]
