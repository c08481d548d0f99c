"""Measurements of the prefix index: memory of a block, speed of events, naming and look-up of long prompts."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import psutil

from pdserve.block_hash import NAME_NBYTES, BlockHasher
from pdserve.store.prefix_events import PrefixEvent, event_from, unpack
from router.index import PrefixIndex
from router.placement import WorkerKey

BLOCK_SIZE: Final = 16
NUM_WORKERS: Final = 256
NUM_BLOCKS: Final = 1_000_000
NAMES_PER_EVENT: Final = 512
"""The blocks of a prompt of 8k tokens."""
HASHER: Final = BlockHasher(model_fingerprint="benchmark", block_size=BLOCK_SIZE)


def worker_keys(num: int = NUM_WORKERS) -> list[WorkerKey]:
    """The first half prefills, the second one decodes."""
    return [WorkerKey(f"w{number}", f"{number:016x}") for number in range(num)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledIndex:
    """An index with NUM_BLOCKS names, each of them on a prefill and on a decode worker, and what it took."""

    index: PrefixIndex
    bytes_per_block: float
    """Growth of resident memory."""
    blocks_per_s: float
    """Claims of workers taken in from entries of streams."""


def fill(num_blocks: int) -> FilledIndex:
    """The process should not have had, and freed, much memory before: what it has left over is not counted."""
    keys = worker_keys()
    half = len(keys) // 2
    index = PrefixIndex()
    gc.collect()
    before = psutil.Process().memory_info().rss
    taken_s = 0.0
    num_events = num_blocks // NAMES_PER_EVENT
    for number in range(num_events):
        packed = os.urandom(NAMES_PER_EVENT * NAME_NBYTES)
        for seq, key in enumerate((keys[number % half], keys[half + number * 31 % half]), start=1):
            entry = _entry(key, seq, stored=packed)
            began = time.perf_counter()
            take(index, key, event_from(entry))
            taken_s += time.perf_counter() - began
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    assert len(index) == num_events * NAMES_PER_EVENT, "an index has lost something"
    return FilledIndex(
        index=index,
        bytes_per_block=grown / len(index),
        blocks_per_s=2 * len(index) / taken_s,
    )


def replaced_per_s(index: PrefixIndex, num_events: int) -> float:
    """Blocks per second in the steady state: each event drops as many blocks as it stores. Leaves `index` as it was."""
    key = worker_keys()[0]
    packed = [os.urandom(NAMES_PER_EVENT * NAME_NBYTES) for _ in range(num_events + 1)]
    entries = [_entry(key, seq, stored=new, removed=old) for seq, (old, new) in enumerate(pairwise(packed), start=2)]
    index.stored(key, unpack(packed[0]))
    began = time.perf_counter()
    for entry in entries:
        take(index, key, event_from(entry))
    taken_s = time.perf_counter() - began
    index.removed(key, unpack(packed[-1]))
    return 2 * NAMES_PER_EVENT * num_events / taken_s


def take(index: PrefixIndex, key: WorkerKey, event: PrefixEvent) -> None:
    """As a router takes it."""
    index.removed(key, event.removed)
    index.stored(key, event.stored)


def long_prompt_s(index: PrefixIndex, num_tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds to name the blocks of such a prompt, and to look them up when two workers have them all."""
    draw = random.Random(1)
    keys = worker_keys()
    hashing: list[float] = []
    looking: list[float] = []
    for number in range(rounds):
        token_ids = [draw.randrange(1 << 17) for _ in range(num_tokens)]
        holders = (keys[number], keys[-1 - number])
        for key in holders:
            index.stored(key, HASHER.chain().upto(num_tokens, token_ids))
        began = time.perf_counter()
        names = HASHER.chain().upto(num_tokens, token_ids)
        named = time.perf_counter()
        found = index.match(names)
        looking.append(time.perf_counter() - named)
        hashing.append(named - began)
        assert found == dict.fromkeys(holders, num_tokens // BLOCK_SIZE), "a look-up has missed a prompt"
        for key in holders:
            index.removed(key, names)
    return hashing, looking


def prompts(index: PrefixIndex, num_tokens: int, num: int) -> Iterator[tuple[str, list[bytes]]]:
    """Kinds of prompts, in turns, and the names of their blocks; what is held of them is in `index`.

    `new`: nobody has anything of it. `system`: its first quarter is on all workers, as a system prompt is. `chat`:
    its first three quarters are on a prefill and a decode worker, its first quarter on all. `fan`: each worker has
    another part of it.
    """
    keys = worker_keys()
    half = len(keys) // 2
    num_blocks = num_tokens // BLOCK_SIZE
    system = _names(num_blocks // 4)
    for key in keys:
        index.stored(key, system)
    fan = _names(num_blocks)
    for number, key in enumerate(keys):
        index.stored(key, fan[: 1 + number * num_blocks // len(keys)])
    for number in range(num):
        kind = ("new", "system", "chat", "fan")[number % 4]
        if kind == "new":
            yield kind, _names(num_blocks)
        elif kind == "fan":
            yield kind, fan
        else:
            names = system + _names(num_blocks - len(system))
            if kind == "chat":
                for key in (keys[number % half], keys[half + number % half]):
                    index.stored(key, names[: 3 * num_blocks // 4])
            yield kind, names


def _names(num: int) -> list[bytes]:
    return unpack(os.urandom(num * NAME_NBYTES))


def _entry(key: WorkerKey, seq: int, *, stored: bytes = b"", removed: bytes = b"") -> dict[bytes, bytes]:
    """As redis-py gives it."""
    return {
        b"incarnation": key.incarnation.encode(),
        b"seq": str(seq).encode(),
        b"cleared": b"0",
        b"removed": removed,
        b"stored": stored,
    }
