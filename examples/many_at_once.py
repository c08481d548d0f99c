"""Many prompts at a time with asyncio: as many as the cluster can use, and no failure goes unnoticed.

    python examples/many_at_once.py [ROUTER ...]

With several routers, one that is lost is replaced by the next; requests that are refused for now are made again.
"""

import asyncio
import sys

from pdserve.client import DEFAULT_ADDRESS, AsyncClient
from pdserve.errors import PdServeError

AT_ONCE = 8
WORDS = ("apple", "brick", "cloud", "desert", "engine", "forest", "glacier", "harbour", "island", "jungle")


async def define(client: AsyncClient, limit: asyncio.Semaphore, word: str) -> None:
    async with limit:
        try:
            answer = await client.generate(f"{word.capitalize()}: a noun that means", max_tokens=16, temperature=0)
        except PdServeError as error:
            print(f"{word}: {error.code} in request {error.request_id}: {error}")
        else:
            print(f"{word}: {answer.text.strip()!r} after {answer.timings.ttft_ms:.0f} ms")


async def main() -> None:
    limit = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(sys.argv[1:] or DEFAULT_ADDRESS, timeout_s=60) as client, asyncio.TaskGroup() as group:
        for word in WORDS:
            group.create_task(define(client, limit, word))


asyncio.run(main())
