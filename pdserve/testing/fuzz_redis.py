"""What somebody who can write to redis could put there in place of what routers and workers have written."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pdserve.store.keys import Keyspace
from pdserve.testing import fuzz_json
from pdserve.testing.fuzz_values import damaged, odd_bytes, odd_float, odd_int, odd_text

TTL_MS: Final = 400
"""Of what is written: it is gone before it is too much."""
_NUMBERS: Final = (b"attempt", b"epoch", b"num_outputs", b"num_prompt_tokens", b"created_ms", b"updated_ms", b"seq")
_STATES: Final = (b"QUEUED", b"PREFILLING", b"TRANSFERRING", b"DECODING", b"FINISHED", b"FAILED", b"CANCELLED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Good values, as they were in redis."""

    record: Mapping[bytes, bytes]
    """Of a request; its output may be empty."""
    resume: bytes
    worker: Mapping[bytes, bytes]
    event: Mapping[bytes, bytes]
    """An entry of the stream of a worker."""


class RedisFuzzer:
    """Writes under the names of one deployment."""

    def __init__(self, rng: Random, redis: Redis, keys: Keyspace, samples: Samples, workers: Sequence[str]) -> None:
        """`workers` are the ids of those that there are, with their streams of announcements."""
        self._rng = rng
        self._redis = redis
        self._keys = keys
        self._samples = samples
        self._workers = workers
        self._numbers = itertools.count(1)

    async def request(self) -> str:
        """A record, mostly with what another router would need to go on with it. Returns the name of the request."""
        rng, name = self._rng, f"stored-{next(self._numbers)}"
        record = dict(self._samples.record)
        record[b"owner"] = f"gone-{name}".encode()
        if rng.random() < 0.5:
            record[b"state"] = rng.choice(_STATES)
        await self._put(self._keys.request(name), self._altered(record))
        if rng.random() < 0.9:
            resume = self._samples.resume
            await self._put(self._keys.resume(name), resume if rng.random() < 0.4 else self._altered_json(resume))
        return name

    async def lease(self) -> str:
        """Something in place of the lease of a router. Returns the id of the router."""
        name = f"router-{next(self._numbers)}"
        await self._put(self._keys.router(name), odd_bytes(self._rng))
        return name

    async def worker(self) -> None:
        """A worker that there is not, in the index of all."""
        rng, name = self._rng, f"stored-{next(self._numbers)}"
        stored = self._altered(self._samples.worker)
        if b"info" in stored and rng.random() < 0.8:
            info = self._samples.worker[b"info"].replace(b'"worker_id":"', b'"worker_id":"stored-', 1)
            stored[b"info"] = self._altered_json(info)
        await self._put(self._keys.worker(name), stored)
        with contextlib.suppress(ResponseError):  # the index is something else now
            await self._redis.zadd(self._keys.workers, {name: time.time() * 1000 + TTL_MS})
        if await self._redis.pttl(self._keys.workers) == -1:  # there was no index just then
            await self._redis.pexpire(self._keys.workers, TTL_MS)

    async def announcement(self) -> None:
        """An entry in the stream of a worker, or something in place of the stream, of the set, or of the index."""
        rng, worker = self._rng, self._rng.choice(self._workers)
        match rng.randrange(8):
            case 0:
                await self._put(self._keys.events(worker), odd_bytes(rng))
            case 1:
                await self._redis.delete(self._keys.events(worker))
            case 2:
                await self._put(self._keys.meta, self._altered({b"schema": b"1", b"generation": b"x"}))
            case 3:
                await self._put(self._keys.workers, odd_bytes(rng))
            case _:
                fields = self._altered(self._samples.event) or {b"x": b"y"}
                with contextlib.suppress(ResponseError):  # the stream is something else now
                    await self._redis.xadd(self._keys.events(worker), _mapping(fields), maxlen=100)
                await self._redis.pexpire(self._keys.events(worker), TTL_MS)

    async def _put(self, key: str, value: Mapping[bytes, bytes] | bytes) -> None:
        """Now and then of another type than it should be."""
        with contextlib.suppress(ResponseError):  # its worker has written something else meanwhile
            await self._write(key, value)
        await self._redis.pexpire(key, TTL_MS)

    async def _write(self, key: str, value: Mapping[bytes, bytes] | bytes) -> None:
        redis, rng = self._redis, self._rng
        await redis.delete(key)
        match rng.randrange(12):
            case 0:
                await redis.rpush(key, odd_bytes(rng))
            case 1:
                await redis.sadd(key, odd_bytes(rng))
            case 2:
                await redis.zadd(key, {odd_text(rng) or "x": 1.0})
            case _ if isinstance(value, bytes):
                await redis.set(key, value)
            case _ if value:
                await redis.hset(key, mapping=_mapping(value))

    def _altered(self, fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        rng, altered = self._rng, dict(fields)
        for _ in range(rng.choice((0, 1, 1, 2))):
            name = rng.choice(sorted(altered)) if altered else b"x"
            match rng.randrange(5):
                case 0:
                    altered.pop(name, None)
                case 1:
                    altered[odd_bytes(rng)] = odd_bytes(rng)
                case 2 if altered:
                    altered[name] = damaged(altered.get(name, b""), rng)
                case _:
                    number = str(odd_int(rng, -(2**70), 2**70)).encode()
                    other: Any = (odd_text(rng).encode(), str(odd_float(rng)).encode(), odd_bytes(rng), number)
                    altered[name] = number if name in _NUMBERS else rng.choice(other)
        return altered

    def _altered_json(self, data: bytes) -> bytes:
        """Of JSON."""
        return fuzz_json.body(json.loads(data), self._rng)


def _mapping(fields: Mapping[bytes, bytes]) -> dict[Any, Any]:
    """In the type that redis-py wants, which is invariant."""
    return dict(fields)
