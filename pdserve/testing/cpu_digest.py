"""What the CPU engine computes for fixed requests, as one digest: for comparing processes and instruction sets.

Run as `python -m pdserve.testing.cpu_digest MODEL ...` it prints the digests of these models as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from pdserve.engine.batch import SampleRequest, SequenceChunk, build_batch
from pdserve.engine.cpu.isa import selected_isa
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.engine.cpu.weights import WeightFormat
from pdserve.model.source import open_model
from pdserve.types import SamplingParams

_FORMATS: tuple[WeightFormat, ...] = ("f32", "f16", "q8_0", "q4_1", "auto")
_SAMPLING = (
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=4),
)
_LENGTHS = (150, 5, 33)


def digest_of(model: str) -> str:
    """SHA-256 of logits, drawn tokens and KV bytes of three requests in every weight format that can be asked for, that
    of the file included."""
    source = open_model(model)
    digest = hashlib.sha256()
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, source.config.vocab_size, n).astype(np.int32) for n in _LENGTHS]
    chunks = [
        SequenceChunk(
            token_ids=prompt,
            start_position=0,
            block_table=range(10 * i, 10 * i + 10),
            samples=(SampleRequest(params=params),),
        )
        for i, (prompt, params) in enumerate(zip(prompts, _SAMPLING, strict=True))
    ]
    batch = build_batch(chunks, 16)
    for weights in _FORMATS:
        engine = load_cpu_engine(source, weights=weights, num_blocks=30, num_threads=1)
        digest.update(engine.forward_logits(batch).tobytes())
        digest.update(engine.forward(batch).token_ids.tobytes())
        for piece in engine.store.read(range(30), 0, source.config.num_layers):
            digest.update(piece)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"isa": selected_isa(), "digests": [digest_of(model) for model in sys.argv[1:]]}))
