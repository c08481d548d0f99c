"""What a key learns of the requests of others: how many there are. Operators learn where they are, not their output."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pdserve.client import AsyncClient, RetryPolicy
from pdserve.errors import NotFoundError, WrongRouterError
from pdserve.security.api_keys import new_key, read_keys, write_keys
from pdserve.store.client import Store
from pdserve.store.requests import RequestRecords
from pdserve.testing.fake_fleet import FakeFleet
from pdserve.testing.http_rig import make_chat_model
from pdserve.testing.router_rig import PROMPT, RouterRigs, expected, make_config
from pdserve.testing.waiting import eventually
from router.service import RouterService

ONCE = RetryPolicy(max_attempts=1)
NAMES = ("alice", "bob", "operator")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


class Shared:
    """Two routers with the same keys, and the ways in."""

    def __init__(self, routers: list[RouterService], fleet: FakeFleet, keys: dict[str, str], keys_file: Path) -> None:
        self.keys_file = keys_file
        self.routers = routers
        self.fleet = fleet
        self.keys = keys

    def client(self, name: str, router: int = 0) -> AsyncClient:
        return AsyncClient(self.routers[router].address, api_key=self.keys[name], timeout_s=10, retry=ONCE)

    def http(self, name: str, router: int = 0) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {self.keys[name]}"}
        return httpx2.AsyncClient(base_url=f"http://{self.routers[router].http_address}", headers=headers, timeout=10)

    async def get(self, name: str, path: str, router: int = 0) -> Any:
        """Body of a 200."""
        async with self.http(name, router) as client:
            answer = await client.get(path)
        assert answer.status_code == 200
        return answer.json()

    async def generate(self, name: str, request_id: str, num_outputs: int = 1) -> None:
        async with self.client(name) as client:
            result = await client.generate(
                token_ids=PROMPT, max_tokens=5, temperature=0, request_id=request_id, n=num_outputs
            )
        assert list(result.token_ids) == expected(5)


@pytest.fixture
async def shared(store: Store, redis_url: str, model_path: Path, tmp_path: Path) -> AsyncIterator[Shared]:
    made = {name: new_key(name, operator=name == "operator") for name in NAMES}
    write_keys(tmp_path / "keys.yaml", [entry for entry, _ in made.values()])
    fleet = RouterRigs(store, redis_url, model_path).new_fleet()
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(fleet.aclose)
        await fleet.add_prefill("p0")
        await fleet.add_decode("d0")
        routers = []
        for name in ("r0", "r1"):
            settings: dict[str, Any] = {"router_id": name, "keys_file": str(tmp_path / "keys.yaml")}
            router = RouterService(make_config(redis_url, store.keys.cluster, model_path, **settings))
            undo.push_async_callback(router.stop)
            await router.start()
            await eventually(lambda router=router: router.pool.has_usable_pair, "a pair is ready")  # type: ignore[misc]
            routers.append(router)
        yield Shared(routers, fleet, {name: key for name, (_, key) in made.items()}, tmp_path / "keys.yaml")


@pytest.mark.parametrize("num_outputs", [1, 3])
async def test_how_a_request_has_ended_is_told_at_every_router_to_its_key_and_to_operators(
    shared: Shared, store: Store, num_outputs: int
) -> None:
    await shared.generate("alice", "alices", num_outputs)
    names = ("alices",) if num_outputs == 1 else ("alices", "alices-2")
    records = RequestRecords(store, retention_s=60.0)

    async def is_recorded() -> bool:
        record = await records.get("alices")
        return record is not None and record.state.value == "FINISHED"

    await eventually(is_recorded, "redis has the end")
    for router in (0, 1):
        for request_id in names:
            async with shared.client("alice", router) as alice, shared.client("operator", router) as operator:
                assert (await alice.get_request(request_id)).state == "FINISHED"
                assert (await operator.get_request(request_id)).state == "FINISHED"
            async with shared.client("bob", router) as bob:
                with pytest.raises(NotFoundError, match="no request 'alices"):
                    await bob.get_request(request_id)
            async with shared.http("bob", router) as client:
                for path in (f"/v1/requests/{request_id}", f"/v1/requests/{request_id}/timeline"):
                    assert (await client.get(path)).status_code == 404
                assert (await client.delete(f"/v1/requests/{request_id}")).status_code == 404
    assert (await shared.get("bob", "/dashboard/requests/alices", router=1))["state"] is None


async def test_output_is_for_the_key_that_asked_alone_and_nobody_else_learns_where_it_is(shared: Shared) -> None:
    await shared.generate("alice", "alices")
    async with shared.client("alice", 1) as alice:
        with pytest.raises(WrongRouterError):
            await alice.attach("alices").result()
    for name in ("bob", "operator"):
        for router in (0, 1):
            async with shared.client(name, router) as client:
                with pytest.raises(NotFoundError, match="no request 'alices'"):
                    await client.attach("alices").result()
            async with shared.http(name, router) as client_http:
                assert (await client_http.get("/v1/requests/alices/events")).status_code == 404


async def test_a_stranger_does_not_move_a_request_whose_router_is_gone(shared: Shared, store: Store) -> None:
    shared.fleet.decode["d0"].before_step.hold()
    async with shared.client("alice") as alice:
        stream = alice.stream(token_ids=PROMPT, max_tokens=5, temperature=0, request_id="alices", resumable=True)
        reading = stream.__aiter__()
        await reading.__anext__()
        await shared.routers[0].stop()
        await store.command("DEL", store.keys.router("r0"))
        with contextlib.suppress(Exception):
            await stream.close()
    async with shared.client("bob", 1) as bob:
        with pytest.raises(NotFoundError):
            await bob.attach("alices").result()
    record = await RequestRecords(store, retention_s=60.0).get("alices")
    assert record is not None and (record.owner, record.epoch) == ("r0", 1)
    shared.fleet.decode["d0"].before_step.release()
    async with shared.client("alice", 1) as alice:
        assert list((await alice.attach("alices").result()).token_ids) == expected(5)


async def test_the_flight_recorder_shows_each_key_its_own_outputs_and_operators_all(shared: Shared) -> None:
    await shared.generate("alice", "alices", 3)
    await shared.generate("bob", "bobs")

    async def names(key: str) -> set[str]:
        trace = await shared.get(key, "/debug/flight")
        return {event["name"] for event in trace["traceEvents"] if event["name"].startswith(("alices", "bobs"))}

    alices = {"alices-0", "alices-1", "alices-2"}

    async def are_there() -> bool:
        return len(await names("operator")) == 4

    await eventually(are_there, "the recorder has all of them")
    assert [await names(key) for key in NAMES] == [alices, {"bobs"}, alices | {"bobs"}]


async def test_the_page_lists_each_key_its_own_outputs_and_counts_all(shared: Shared) -> None:
    decode = shared.fleet.decode["d0"]
    decode.before_step.hold()
    async with shared.client("alice") as alice, shared.client("bob") as bob, shared.client("operator") as operator:
        streams = [
            client.stream(token_ids=PROMPT, max_tokens=5, temperature=0, request_id=name)
            for client, name in ((alice, "alices"), (bob, "bobs"))
        ]
        for stream in streams:
            await stream.__aiter__().__anext__()
        listed = {}
        for name in NAMES:
            state = await shared.get(name, "/dashboard/state")
            listed[name] = {request["id"] for request in state["requests"]}
            assert state["num_requests"] == 2
            async with shared.http(name) as client, client.stream("GET", "/dashboard/events") as events:
                # The first event is the whole state, the next one what is shared by who may see the same.
                lines = (line async for line in events.aiter_lines() if line.startswith("data: "))
                assert ["alices" in line or "bobs" in line for line in [await anext(lines), await anext(lines)]] == [
                    True
                ] * 2
                assert ("bobs" in await anext(lines)) is (name != "alice")
        assert listed == {"alice": {"alices"}, "bob": {"bobs"}, "operator": {"alices", "bobs"}}
        assert not await bob.cancel("alices")
        assert await operator.cancel("alices"), "operators stop what runs amok"
        decode.before_step.release()
        for stream in streams:
            await stream.close()


async def test_a_page_that_is_open_shows_what_its_key_may_see_now(shared: Shared) -> None:
    """An operator's key becomes one like others and is revoked then, while its stream of events goes on."""
    decode = shared.fleet.decode["d0"]
    decode.before_step.hold()
    keys = {key.name: key for key in read_keys(shared.keys_file)}
    async with shared.client("alice") as alice, shared.http("operator") as http:
        stream = alice.stream(token_ids=PROMPT, max_tokens=5, temperature=0, request_id="alices")
        await stream.__aiter__().__anext__()
        async with http.stream("GET", "/dashboard/events") as events:
            lines = (line async for line in events.aiter_lines() if line.startswith("data: "))
            assert "alices" in await anext(lines)
            keys["operator"] = keys["operator"].model_copy(update={"operator": False})
            write_keys(shared.keys_file, list(keys.values()))
            async with asyncio.timeout(20):
                while "alices" in await anext(lines):
                    continue
            del keys["operator"]
            write_keys(shared.keys_file, list(keys.values()))
            async with asyncio.timeout(20):
                assert [line for line in [line async for line in lines] if "alices" in line] == []
        async with http.stream("GET", "/dashboard/events") as events:
            assert events.status_code == 401
        decode.before_step.release()
        await stream.close()
