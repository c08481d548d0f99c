"""A router with fake workers on a thread of its own, for tests that drive a browser from theirs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from pdserve.store.client import Store
from pdserve.testing.fake_fleet import FakeFleet
from pdserve.testing.fake_worker_base import NextToken
from pdserve.testing.http_rig import make_chat_model
from pdserve.testing.router_rig import RouterRigs
from pdserve.testing.tiny_tokenizers import byte_level_spelling, token_id

START_S = 60.0
ResultT = TypeVar("ResultT")


def spelling(model: Path, text: str) -> NextToken:
    """A next token that spells `text` over and over, in tokens of one byte each, whatever came before."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens = [token_id(tokenizer, char) for char in byte_level_spelling(text)]

    def next_token(token_ids: Sequence[int]) -> int:
        # The longest beginning of the text that the tokens end with says how far it has got.
        for length in range(min(len(tokens), len(token_ids)), 0, -1):
            if list(token_ids[-length:]) == tokens[:length]:
                return tokens[length % len(tokens)]
        return tokens[0]

    return next_token


class PageRig:
    """What a test may do with it from its own thread."""

    def __init__(self, address: str, fleet: FakeFleet, stop: asyncio.Event) -> None:
        """Made where the router runs. `address` is host:port of its HTTP API."""
        self.address = address
        self.fleet = fleet
        self._stop = stop
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """End the router; harmless when repeated."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def tell(self, what: Callable[[], None]) -> None:
        """The same for a plain call."""

        async def call() -> None:
            what()

        self.call(call())

    def call(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run it where the router runs."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_S)


@contextlib.contextmanager
def page_rig(
    directory: Path, redis_url: str, *, prefill: int = 1, decode: int = 1, text: str = "Well. ", **router: Any
) -> Iterator[PageRig]:
    """Workers p0.. and d0.., whose answers are `text` over and over; both 0: there is nobody. `router` are settings of
    that section."""
    model = make_chat_model(directory)
    rigs: list[PageRig] = []
    ready = threading.Event()
    failures: list[BaseException] = []

    async def serve() -> None:
        store = await Store.connect(redis_url, f"page-{secrets.token_hex(6)}")
        try:
            routers, stop = RouterRigs(store, redis_url, model), asyncio.Event()
            async with contextlib.AsyncExitStack() as stack:
                if prefill or decode:
                    rig = await stack.enter_async_context(
                        routers.start(prefill, decode, next_token=spelling(model, text), http_port=0, **router)
                    )
                    service, fleet = rig.router, rig.fleet
                else:
                    service, _ = await stack.enter_async_context(routers.router(http_port=0, **router))
                    fleet = routers.new_fleet()
                rigs.append(PageRig(service.http_address, fleet, stop))
                ready.set()
                await stop.wait()
        finally:
            await store.aclose()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="page-rig")
    thread.start()
    try:
        assert ready.wait(START_S), "the router did not start"
        if rigs:
            yield rigs[0]
    finally:
        if rigs and thread.is_alive():
            rigs[0].stop()
        thread.join(START_S)
    if failures:
        raise failures[0]
