"""A fresh process that loads the CPU engine, and serves if told to; prints one JSON object about itself.

Run as `python engine_process.py MODEL THREADS SEQUENCES TOKENS`: loads a pool for SEQUENCES x TOKENS tokens and, unless
SEQUENCES is 0, fills it the way requests would: prompts in chunks, then the last tokens by decoding. It imports what a
decode worker imports, so that its code counts as well.
"""

from __future__ import annotations

import json
import sys
import time

import psutil

DECODED_TOKENS = 32
"""At the end of each sequence; the rest is its prompt."""


def main() -> None:
    """See the module."""
    model, threads, sequences, tokens = sys.argv[1], *map(int, sys.argv[2:])
    began = time.perf_counter()
    import numpy as np

    import decode_worker.service  # noqa: F401 - only for its memory
    from benchmarks.harness.cpu_rig import CHUNK_TOKENS, GREEDY, CpuRig
    from pdserve.engine.batch import SampleRequest, SequenceChunk, build_batch
    from pdserve.engine.cpu.loader import load_cpu_engine
    from pdserve.model.source import open_model

    imported = time.perf_counter()
    source = open_model(model)
    block_size = 16
    blocks_each = -(-tokens // block_size)
    engine = load_cpu_engine(
        source, num_blocks=max(sequences, 1) * blocks_each, block_size=block_size, num_threads=threads
    )
    loaded = time.perf_counter()
    rig = CpuRig(engine)
    tables = list(np.arange(sequences * blocks_each, dtype=np.int32).reshape(sequences, blocks_each))
    prompt_tokens = tokens - DECODED_TOKENS
    for table in tables:
        prompt = rig.random_tokens(prompt_tokens)
        for begin in range(0, prompt_tokens, CHUNK_TOKENS):
            chunk = SequenceChunk(
                token_ids=prompt[begin : begin + CHUNK_TOKENS],
                start_position=begin,
                block_table=table,
                samples=(SampleRequest(params=GREEDY),) if begin + CHUNK_TOKENS >= prompt_tokens else (),
            )
            engine.forward(build_batch([chunk], block_size))
    for position in range(prompt_tokens, tokens) if sequences else ():
        engine.forward(rig.decode_batch(tables, position))
    memory = psutil.Process().memory_info()
    print(
        json.dumps(
            {
                "import_s": imported - began,
                "load_s": loaded - imported,
                "resident_bytes": memory.rss,
                # Of the mapped model file and libraries: pages the system may drop and read again.
                "shared_bytes": memory.shared,
                "pool_bytes": engine.num_blocks * engine.layout.block_nbytes,
                "torch_imported": "torch" in sys.modules,
            }
        )
    )


if __name__ == "__main__":
    main()
