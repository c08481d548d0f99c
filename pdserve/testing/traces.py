"""Traces of requests, as files of the Mooncake format have them: arrival, lengths, and which prefixes are shared."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.block_hash import BlockHashes

BLOCK_TOKENS: Final = 512
"""Prompt tokens that one number of a trace stands for."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line of a trace."""

    arrival_s: float
    """Since the first request."""
    num_tokens: int
    """Of the prompt."""
    output_tokens: int
    names: tuple[bytes, ...]
    """16 bytes for each full block of the prompt, in the manner of `pdserve.block_hash`: equal names mean equal tokens
    up to the end of the block. The trace also numbers a last block that is not full; a cache of full blocks cannot hold
    it."""


def read_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """The first `limit` requests of a gzipped Mooncake trace, or all, in the order of arrival."""
    requests: list[TracedRequest] = []
    names: dict[int, bytes] = {}
    with gzip.open(path, "rt") as lines:
        for line in lines:
            if limit is not None and len(requests) == limit:
                break
            fields = json.loads(line)
            full = fields["hash_ids"][: fields["input_length"] // BLOCK_TOKENS]
            for number in full:
                if number not in names:
                    names[number] = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()
            requests.append(
                TracedRequest(
                    arrival_s=fields["timestamp"] / 1e3,
                    num_tokens=fields["input_length"],
                    output_tokens=fields["output_length"],
                    names=tuple(names[number] for number in full),
                )
            )
    return requests


class NamedBlocks(BlockHashes):
    """The chain of a sequence whose blocks have their names already."""

    def __init__(self, names: Sequence[bytes], block_size: int = BLOCK_TOKENS) -> None:
        super().__init__(b"", block_size)
        self._hashes = list(names)


def unbounded_hit_rate(requests: Sequence[TracedRequest]) -> float:
    """Share of all prompt tokens that one cache that forgets nothing would serve: the most that placement can reach."""
    held: set[bytes] = set()
    cached = 0
    for request in requests:
        cached += BLOCK_TOKENS * sum(1 for _ in _leading(request.names, held))
        held.update(request.names)
    return cached / sum(request.num_tokens for request in requests)


def _leading(names: Sequence[bytes], held: set[bytes]) -> Iterator[bytes]:
    for name in names:
        if name not in held:
            return
        yield name
