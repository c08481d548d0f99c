"""Prefixes that prefill workers fetch from others, with engines whose tokens depend on every byte of KV they find."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from decode_worker.service import DecodeService
from kv_transfer.messages import PrefixRequest
from kv_transfer.prefix_client import PrefixClient
from pdserve.block_hash import BlockHasher
from pdserve.config import Config
from pdserve.errors import IncompatibleWorkersError, PdServeError, UnavailableError
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.testing.cluster import test_config
from pdserve.testing.fake_engine import expected
from pdserve.testing.scripted_holder import Script, ScriptedHolder, say_nothing
from pdserve.testing.waiting import eventually
from pdserve.testing.worker_rig import Rig, prompt_of, rig
from pdserve.types import HandoffId, PrefixHolder, Role
from prefill_worker.service import PrefillService

Tokens = tuple[int, ...]


@pytest.fixture
def config(redis_url: str, cluster_name: str) -> Config:
    """Fetches whatever a holder is said to have; what is faster than a fake engine is nothing to go by."""
    return test_config(redis_url, cluster_name, transfer={"fetch_prefixes": "always"})


def holder(worker: PrefillService | DecodeService, num_tokens: int) -> PrefixHolder:
    info = worker.host.info
    return PrefixHolder(
        worker_id=info.worker_id, incarnation=info.incarnation, address=info.address, num_tokens=num_tokens
    )


async def ask(
    r: Rig, prompt: Tokens, max_new: int = 8, *, on: int = 0, holders: tuple[PrefixHolder, ...] = (), salt: str = ""
) -> pb.FirstToken:
    """Run one request on prefill worker number `on`. Its output must be exact."""
    job = r.job(prompt, max_new, cache_salt=salt)
    key = await r.router.submit(job, r.targets, session=r.router.sessions[on], holders=holders)
    return await result(r, key, prompt, max_new)


async def result(r: Rig, key: HandoffId, prompt: Tokens, max_new: int = 8) -> pb.FirstToken:
    await r.router.finished(key)
    assert r.router.output(key) == expected(prompt, max_new)
    return next(e for e in r.router.events[key] if isinstance(e, pb.FirstToken))


async def first_turn(r: Rig) -> Tokens:
    """A turn of a chat on the first prefill worker; gives the prompt of the next one. The decode worker has KV of its
    first 89 tokens, 5 whole blocks, the prefill worker of the first 3 blocks."""
    first = prompt_of(50)
    await ask(r, first, 40)
    return first + tuple(expected(first, 40)) + prompt_of(30, salt=1)


async def test_next_turn_on_another_prefill_worker_fetches_prompt_and_answer_from_the_decode_worker(
    config: Config,
) -> None:
    async with rig(config, prefill=2) as r:
        second = await first_turn(r)
        d, p2 = r.cluster.decode[0], r.cluster.prefill[1]
        first_token = await ask(r, second, on=1, holders=(holder(d, 64),))
        assert (first_token.cached_tokens, first_token.fetched_tokens) == (80, 80), "all that is there, not the hint"
        assert 0 < first_token.fetch_s <= first_token.queue_s
        stats = p2.stats()
        assert stats.prefill_tokens_total == len(second) - 80
        assert (stats.fetches_total, stats.fetched_tokens_total, stats.failed_fetches_total) == (1, 80, 0)
        assert stats.fetched_bytes_total == 5 * r.decode[0].layout.block_nbytes
        assert d.stats().served_fetches_total == 1


async def test_prefix_that_another_prefill_worker_has_computed_is_fetched_from_it(config: Config) -> None:
    async with rig(config, prefill=2) as r:
        prompt = prompt_of(100)
        await ask(r, prompt)
        p1, p2 = r.cluster.prefill
        first_token = await ask(r, (*prompt, 1, 2, 3), on=1, holders=(holder(p1, 64),))
        assert (first_token.cached_tokens, first_token.fetched_tokens) == (96, 96)
        assert p2.stats().prefill_tokens_total == 7 and p1.stats().served_fetches_total == 1


async def test_salted_prefix_is_fetched_for_equal_salt_alone(config: Config) -> None:
    async with rig(config, prefill=2) as r:
        for number, worker in enumerate((r.cluster.decode[0], r.cluster.prefill[0])):
            prompt = prompt_of(100, salt=number)
            await ask(r, prompt, salt="x")
            for salt, num_tokens in (("", 0), ("y", 0), ("x", 96)):
                first_token = await ask(r, (*prompt, 1), on=1, holders=(holder(worker, 96),), salt=salt)
                assert (first_token.cached_tokens, first_token.fetched_tokens) == (num_tokens, num_tokens)


async def test_only_what_is_missing_is_moved(config: Config) -> None:
    async with rig(config, prefill=2) as r:
        second = await first_turn(r)
        await ask(r, second[:40], on=1)
        first_token = await ask(r, second, on=1, holders=(holder(r.cluster.decode[0], 80),))
        assert (first_token.cached_tokens, first_token.fetched_tokens) == (80, 48), "two blocks were there"
        assert r.cluster.prefill[1].stats().fetched_bytes_total == 3 * r.decode[0].layout.block_nbytes
        again = await ask(r, second, on=1, holders=(holder(r.cluster.decode[0], 80),))
        assert (again.cached_tokens, again.fetched_tokens, again.fetch_s) == (112, 0, 0.0)
        assert r.cluster.prefill[1].stats().fetches_total == 1


async def test_equal_beginnings_that_come_at_once_are_fetched_once(config: Config) -> None:
    async with rig(config, prefill=2) as r:
        second = await first_turn(r)
        d, p2 = r.cluster.decode[0], r.cluster.prefill[1]
        prompts = [(*second, i) for i in range(4)]
        keys = [
            await r.router.submit(r.job(p), r.targets, session=r.router.sessions[1], holders=(holder(d, 80),))
            for p in prompts
        ]
        for key, prompt in zip(keys, prompts, strict=True):
            assert (await result(r, key, prompt)).cached_tokens >= 80
        assert p2.stats().fetches_total == 1 and d.stats().served_fetches_total == 1


async def test_requests_that_wait_for_one_fetch_go_on_when_it_brings_nothing(config: Config) -> None:
    release = asyncio.Event()

    async def hold_back(holder: ScriptedHolder, request: PrefixRequest) -> int:
        await release.wait()
        return 0

    async with rig(config) as r, scripted(r, hold_back) as other:
        prompts = [(*prompt_of(80), i) for i in range(3)]
        keys = [await r.router.submit(r.job(p), r.targets, holders=(other.holder(64),)) for p in prompts]
        p = r.cluster.prefill[0]
        await eventually(lambda: p.stats().num_waiting == 3 and len(other.asked) == 1, "all wait for one fetch")
        # Somebody else is computed meanwhile.
        await r.works()
        release.set()
        for key, prompt in zip(keys, prompts, strict=True):
            assert (await result(r, key, prompt)).fetched_tokens == 0
        assert len(other.asked) == 1 and p.stats().failed_fetches_total == 1


async def test_holder_that_has_evicted_the_prefix_costs_one_question(config: Config) -> None:
    async with rig(config, prefill=2, decode_blocks=12) as r:
        second = await first_turn(r)
        await ask(r, prompt_of(180, salt=7))
        d, p2 = r.cluster.decode[0], r.cluster.prefill[1]
        first_token = await ask(r, second, on=1, holders=(holder(d, 80),))
        assert (first_token.cached_tokens, first_token.fetched_tokens) == (0, 0)
        assert p2.stats().prefill_tokens_total == len(second)
        assert (p2.stats().failed_fetches_total, d.stats().served_fetches_total) == (1, 0)


async def test_holder_that_has_evicted_the_end_of_the_prefix_sends_its_beginning(config: Config) -> None:
    async with rig(config, prefill=2, decode_blocks=12) as r:
        second = await first_turn(r)
        await ask(r, prompt_of(110, salt=7))
        first_token = await ask(r, second, on=1, holders=(holder(r.cluster.decode[0], 80),))
        assert 0 < first_token.fetched_tokens < 80, "some blocks are left, the first ones"


# Faults ---------------------------------------------------------------------------------------------------------------


def scripted(
    r: Rig, script: Script, *, fingerprint: str = "fake", codecs: tuple[str, ...] = ("none",)
) -> ScriptedHolder:
    """A holder beside the workers of the rig, which takes itself for a decode worker."""
    info = replace(
        r.cluster.decode[0].host.info,
        worker_id="other",
        incarnation="other-1",
        model_fingerprint=fingerprint,
        codecs=codecs,
    )
    return ScriptedHolder(info, script)


async def push_half(other: ScriptedHolder, request: PrefixRequest) -> None:
    """Reserve, send the first blocks, and wait until they have arrived."""
    handoff = other.begin(request, 64)
    await handoff.reserve()
    handoff.advance(32)


@pytest.mark.parametrize("how", ["dies", "answers nothing", "stalls", "forgets"])
async def test_holder_that_is_lost_in_the_middle_of_a_fetch_costs_no_block_and_no_token(
    how: str, redis_url: str, cluster_name: str
) -> None:
    config = test_config(
        redis_url, cluster_name, transfer={"fetch_prefixes": "always", "stall_timeout_s": 0.6, "chunk_bytes": 4096}
    )
    half_sent = asyncio.Event()

    async def script(other: ScriptedHolder, request: PrefixRequest) -> int:
        if how != "answers nothing":
            await push_half(other, request)
            half_sent.set()
        if how == "forgets":
            # Its call is over, and it still renews the lease of the reservation.
            raise UnavailableError("made up")
        return await say_nothing(other, request)

    async with rig(config) as r, scripted(r, script) as other:
        p, prompt = r.cluster.prefill[0], prompt_of(80)
        key = await r.router.submit(r.job(prompt), r.targets, holders=(other.holder(64),))
        await eventually(lambda: len(other.asked) == 1, "it is asked")
        if how == "dies":
            await half_sent.wait()
            await eventually(lambda: p.stats().blocks_in_use > 0, "room is reserved")
            await other.die()
        first_token = await result(r, key, prompt)
        assert (first_token.cached_tokens, first_token.fetched_tokens) == (0, 0)
        assert first_token.fetch_s < 3.0
        assert p.stats().failed_fetches_total == 1
        await eventually(lambda: other.num_ended == 1, "the holder's call is over")
        await r.cluster.quiet()
        # Nothing of the half that has come is found by anybody.
        assert (await ask(r, (*prompt[:64], 5))).cached_tokens == 64, "computed here in the meantime"


async def test_cancelled_request_calls_its_fetch_off(config: Config) -> None:
    reserved = asyncio.Event()

    async def script(other: ScriptedHolder, request: PrefixRequest) -> int:
        await push_half(other, request)
        reserved.set()
        return await say_nothing(other, request)

    async with rig(config) as r, scripted(r, script) as other:
        p = r.cluster.prefill[0]
        key = await r.submit(prompt_of(80), holders=(other.holder(64),))
        await reserved.wait()
        assert p.stats().blocks_in_use == 4
        await r.router.cancel(key)
        await eventually(lambda: other.num_ended == 1, "the holder hears of it at once", timeout_s=2.0)
        await eventually(lambda: p.stats().blocks_in_use == 0 and p.stats().num_waiting == 0, "nothing is held")
        assert p.stats().failed_fetches_total == 0, "nobody's fault"
        assert p.stats().blocks_cached == 0, "what had come is not kept"


@pytest.mark.parametrize("fault", ["other blocks", "too many", "no whole block", "lossy", "other model"])
async def test_holder_that_offers_something_else_is_refused(fault: str, config: Config) -> None:
    errors: list[PdServeError] = []

    async def script(other: ScriptedHolder, request: PrefixRequest) -> int:
        num_tokens = {"too many": 160, "no whole block": 40}.get(fault, 64)
        names = {"other blocks": bytes(16), "too many": bytes(16)}
        try:
            await other.begin(request, num_tokens, last_block=names.get(fault)).reserve()
        except PdServeError as error:
            errors.append(error)
            raise
        raise AssertionError("the prefill worker has taken it")

    fingerprint = "other" if fault == "other model" else "fake"
    codecs = ("int8",) if fault == "lossy" else ("none",)
    async with rig(config) as r, scripted(r, script, fingerprint=fingerprint, codecs=codecs) as other:
        prompt = prompt_of(80)
        key = await r.submit(prompt, holders=(other.holder(64),))
        assert (await result(r, key, prompt)).cached_tokens == 0
        named = {"lossy": "codecs", "other model": "model_fingerprint", "other blocks": "last_block"}
        assert named.get(fault, "num_tokens") in errors[0].message
        assert r.cluster.prefill[0].stats().failed_fetches_total == 1


async def test_holder_refuses_who_must_not_have_its_blocks(config: Config) -> None:
    async with rig(config, prefill=2) as r:
        second = await first_turn(r)
        d, p2 = r.cluster.decode[0], r.cluster.prefill[1]
        names = BlockHasher(model_fingerprint="fake", block_size=16).chain().upto(80, second)
        me = p2.host.info.as_prefix_peer
        request = PrefixRequest(id=HandoffId("x/prefix-1", 1), requester=me, names=tuple(names), timeout_s=0.5)
        client = PrefixClient()
        for change, named in (
            ({"model_fingerprint": "other"}, "model_fingerprint"),
            ({"kv_layout": replace(me.kv_layout, numerics="other")}, "kv_layout.numerics"),
            ({"role": Role.DECODE}, "role of"),
        ):
            with pytest.raises(IncompatibleWorkersError, match=named):
                await client.fetch(holder(d, 80), replace(request, requester=replace(me, **change)))
        foreign = BlockHasher(model_fingerprint="other", block_size=16).chain().upto(80, second)
        assert await client.fetch(holder(d, 80), replace(request, names=tuple(foreign))) == 0
        # Control: the names are right. A requester that cannot be reached loses its claim with the call.
        gone = replace(me, address="127.0.0.1:1", incarnation="gone")
        with pytest.raises(PdServeError):
            await client.fetch(holder(d, 80), replace(request, requester=gone))
        await client.aclose()
        await r.cluster.quiet()
        assert d.stats().served_fetches_total == 0


async def test_requests_are_not_taken_by_prefill_workers_nor_prefixes_by_decode_workers(config: Config) -> None:
    async with rig(config, prefill=2) as r:
        as_decode = r.cluster.prefill[1].host.info.target
        key = await r.router.submit(r.job(prompt_of(20)), [as_decode])
        await r.router.finished(key)
        failure = r.router.failure(key)
        assert failure is not None and failure.code == "incompatible_workers" and "role of" in failure.message


async def test_running_sequences_keep_the_blocks_that_they_may_need(redis_url: str, cluster_name: str) -> None:
    config = test_config(redis_url, cluster_name, decode={"reserve_tokens": 0})
    async with rig(config, decode_blocks=8) as r:
        prompt = prompt_of(65)
        await ask(r, prompt, 2)
        d = r.cluster.decode[0]
        assert d.stats().blocks_cached == 4
        r.decode[0].pause()
        running = await r.submit(prompt_of(60, salt=1), 40)
        await r.decode[0].paused()
        assert d.stats().blocks_in_use == 4, "the pool is full, and this one will need more"
        nobody = replace(r.cluster.prefill[0].host.info.as_prefix_peer, address="127.0.0.1:1", incarnation="gone")
        names = BlockHasher(model_fingerprint="fake", block_size=16).chain().upto(64, prompt)
        request = PrefixRequest(id=HandoffId("x/prefix-1", 1), requester=nobody, names=tuple(names), timeout_s=1.0)
        client = PrefixClient()
        asking = asyncio.create_task(client.fetch(holder(d, 64), request))
        await eventually(lambda: d.stats().blocks_in_use == 4 + 3, "all but one of the cached blocks are kept")
        r.decode[0].resume()
        await result(r, running, prompt_of(60, salt=1), 40)
        with pytest.raises(PdServeError):
            await asking
        await client.aclose()
        assert d.stats().preemptions_total == 0


async def test_draining_holder_gives_nothing_away(config: Config) -> None:
    async with rig(config, prefill=2, decode=2) as r:
        second = await first_turn(r)
        d = r.cluster.decode[0]
        await d.drain()
        key = await r.router.submit(
            r.job(second), r.targets[1:], session=r.router.sessions[1], holders=(holder(d, 80),)
        )
        assert (await result(r, key, second)).fetched_tokens == 0
        assert r.cluster.prefill[1].stats().failed_fetches_total == 1


async def test_kv_that_went_through_a_lossy_codec_is_never_fetched(redis_url: str, cluster_name: str) -> None:
    transfer: dict[str, object] = {
        "fetch_prefixes": "always",
        "codec": "int8",
        "accept_codecs": ["none", "int8"],
    }
    async with rig(test_config(redis_url, cluster_name, transfer=transfer), prefill=2) as r:
        (d,), (p1, p2) = r.cluster.decode, r.cluster.prefill
        prompt = prompt_of(80)
        key = await r.submit(prompt, 8)
        await r.router.finished(key)
        # One token each from here on, which the prefill worker draws: it shows that the KV there is right.
        first_token = await ask(r, (*prompt, 1), 1, on=1, holders=(holder(d, 64),))
        assert (first_token.cached_tokens, p2.stats().failed_fetches_total) == (0, 1)
        # What a prefill worker has computed is exact, and stays so on the way to another.
        other = prompt_of(90, salt=3)
        await ask(r, other, 1)
        first_token = await ask(r, (*other, 4), 1, on=1, holders=(holder(p1, 64),))
        assert first_token.fetched_tokens == 80


# Cost -----------------------------------------------------------------------------------------------------------------


async def test_prefix_that_is_computed_sooner_than_fetched_is_computed(redis_url: str, cluster_name: str) -> None:
    async with rig(test_config(redis_url, cluster_name), prefill=2) as r:
        second = await first_turn(r)
        d, p2 = r.cluster.decode[0], r.cluster.prefill[1]
        # Shows how fast it is.
        await ask(r, prompt_of(200, salt=5), on=1)
        first_token = await ask(r, second, on=1, holders=(holder(d, 80),))
        assert (first_token.cached_tokens, first_token.fetch_s) == (0, 0.0)
        assert (p2.stats().declined_fetches_total, p2.stats().fetches_total) == (1, 0)
        assert d.stats().served_fetches_total == 0


async def test_prefill_workers_told_never_to_fetch_do_not(redis_url: str, cluster_name: str) -> None:
    config = test_config(redis_url, cluster_name, transfer={"fetch_prefixes": "never"})
    async with rig(config, prefill=2) as r:
        second = await first_turn(r)
        first_token = await ask(r, second, on=1, holders=(holder(r.cluster.decode[0], 80),))
        assert first_token.cached_tokens == 0 and r.cluster.prefill[1].stats().declined_fetches_total == 0


# All at once ----------------------------------------------------------------------------------------------------------


async def test_chats_on_two_pairs_stay_exact_while_pools_overflow_and_requests_are_cancelled(config: Config) -> None:
    rng = random.Random(3)
    async with rig(config, prefill=2, decode=2, prefill_blocks=24, decode_blocks=24) as r:
        histories = [prompt_of(rng.randint(20, 60), salt=i) for i in range(6)]
        workers: list[PrefillService | DecodeService] = [*r.cluster.prefill, *r.cluster.decode]
        for turn in range(8):
            asked: list[tuple[int, Tokens, int, HandoffId]] = []
            cancelled: set[HandoffId] = set()
            for i, history in enumerate(histories):
                max_new, on = rng.randint(1, 30), rng.randrange(2)
                hints = tuple(holder(w, len(history)) for w in rng.sample(workers, 3) if w is not r.cluster.prefill[on])
                key = await r.router.submit(
                    r.job(history, max_new),
                    rng.sample(r.targets, 2),
                    session=r.router.sessions[on],
                    holders=hints,
                )
                asked.append((i, history, max_new, key))
                if rng.random() < 0.2:
                    cancelled.add(key)
                    await r.router.cancel(key)
            await r.router.finished(*(key for *_, key in asked if key not in cancelled), timeout_s=30.0)
            for i, history, max_new, key in asked:
                want = expected(history, max_new)
                got = r.router.output(key)
                assert got == (want[: len(got)] if key in cancelled else want), f"turn {turn}"
                longer = history + tuple(want) + prompt_of(rng.randint(1, 9), salt=turn)
                histories[i] = longer if len(longer) < 180 else prompt_of(rng.randint(20, 60), salt=turn * 100 + i)
        await r.cluster.quiet(20.0)
        assert sum(p.stats().fetches_total for p in r.cluster.prefill) > 0
        assert all(d.stats().prefill_tokens_total == 0 for d in r.cluster.decode)
