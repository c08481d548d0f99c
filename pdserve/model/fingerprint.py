"""A short digest that tells two models apart, so that workers with different weights never exchange KV.

Every tensor contributes its name, type and shape. Of its bytes, up to 1 MiB are hashed whole; a larger one is
sampled: 64 windows of 4 KiB, evenly spread, first and last bytes included. Another seed, training step, fine-tune,
merge or quantisation changes nearly every byte of the matrices it touches, so it cannot miss all windows; editing
single elements of a large matrix by hand can. In return the cost is bounded by the number of tensors, not their size:
reading a 70B model's bytes in full would take minutes at every start, of the router as well.

The vocabulary counts as well: workers that take the same token ids for different texts must not follow the grammar of
one output.

Names and types are those of the file: a model and its conversion to another format differ, as their arithmetic may.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import numpy as np
import xxhash

from pdserve.model.config import ModelConfig
from pdserve.model.tensors import StoredTensor

_SCHEME = "pdserve-model-2"
_WHOLE_NBYTES = 1 << 20
_WINDOW_NBYTES = 4096
_NUM_WINDOWS = 64


def fingerprint(config: ModelConfig, tensors: Iterable[StoredTensor], vocabulary: bytes = b"") -> str:
    """32 hex digits over the configuration, the tensors, whose order does not matter, and what says which token is
    which."""
    digest = xxhash.xxh3_128()
    digest.update(json.dumps([_SCHEME, dataclasses.asdict(config)], sort_keys=True).encode())
    for tensor in sorted(tensors, key=lambda t: t.name):
        digest.update(json.dumps([tensor.name, tensor.type.name, tensor.shape]).encode())
        nbytes = len(tensor.data)
        if nbytes <= _WHOLE_NBYTES:
            digest.update(tensor.data.data)
            continue
        for begin in np.linspace(0, nbytes - _WINDOW_NBYTES, _NUM_WINDOWS, dtype=np.int64):
            digest.update(tensor.data[begin : begin + _WINDOW_NBYTES].data)
    digest.update(vocabulary)
    return digest.hexdigest()
