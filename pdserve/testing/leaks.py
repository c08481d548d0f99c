"""What must be gone when a test, or a deployment, has ended."""

from __future__ import annotations

from redis.asyncio import Redis

from pdserve.store.client import keys_without_ttl


async def redis_keys_without_ttl(url: str, prefix: str = "") -> list[str]:
    """Keys in the redis at `url` that start with `prefix` and would stay for ever, sorted. Empty is right."""
    async with Redis.from_url(url, protocol=2) as redis:
        return await keys_without_ttl(redis, prefix)
