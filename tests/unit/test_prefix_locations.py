"""Who has the beginning of a sequence: announcements, and this router's own notes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pdserve.block_hash import BlockHasher
from router.index import PrefixIndex, PrefixLocations, PrefixNames
from router.index import locations as module
from router.index.locations import HASH_INLINE_TOKENS, PLACED_S, SERVED_S
from router.placement import WorkerKey

P, D, WIDE = WorkerKey("p", "1"), WorkerKey("d", "1"), WorkerKey("wide", "1")


class Clock:
    now = 100.0


class Fixture:
    """Two workers with blocks of 4 tokens, one with blocks of 8."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.live = True
        self.index = PrefixIndex()
        self.locations = PrefixLocations("model", self.index, live=lambda: self.live, clock=lambda: self.clock.now)
        self.locations.follow({P: 4, D: 4, WIDE: 8})

    def announce(self, worker: WorkerKey, token_ids: Sequence[int], block_size: int = 4, salt: str = "") -> None:
        hasher = BlockHasher(model_fingerprint="model", block_size=block_size)
        self.index.stored(worker, hasher.chain(salt).upto(len(token_ids), token_ids))

    def expected(self, names: PrefixNames) -> dict[WorkerKey, int]:
        return dict(self.locations.expected(names, self.locations.held(names)))


async def test_what_workers_have_is_found_in_tokens() -> None:
    f = Fixture()
    f.announce(P, range(9))
    f.announce(D, range(40))
    f.announce(WIDE, range(23), block_size=8)
    names = await f.locations.names(range(30))
    assert f.locations.held(names) == {D: 28, WIDE: 16, P: 8}


async def test_salted_sequences_are_found_under_their_salt_alone() -> None:
    f = Fixture()
    f.announce(P, range(8), salt="alice")
    f.announce(D, range(8))
    assert f.locations.held(await f.locations.names(range(8), "alice")) == {P: 8}
    assert f.locations.held(await f.locations.names(range(8))) == {D: 8}
    names = await f.locations.names(range(8), "bob")
    assert f.locations.held(names) == {}
    f.locations.served(P, names)
    f.locations.placed(D, names)
    assert f.locations.held(await f.locations.names(range(8), "alice")) == {P: 8}
    assert f.expected(await f.locations.names(range(8))) == {D: 8}


async def test_a_burst_of_equal_prompts_sees_where_the_first_one_went() -> None:
    f = Fixture()
    f.locations.placed(P, await f.locations.names(range(12)))
    burst = await f.locations.names([*range(12), 99])
    assert f.expected(burst) == {P: 12}
    assert f.locations.held(burst) == {}, "nobody can fetch from it what it has not computed"
    f.locations.served(P, await f.locations.names(range(12)))
    assert f.locations.held(burst) == {P: 12}


async def test_own_notes_count_until_announcements_must_have_come() -> None:
    f = Fixture()
    names = await f.locations.names(range(12))
    f.locations.served(P, names)
    f.locations.placed(D, names)
    f.clock.now += SERVED_S - 0.1
    assert f.expected(names) == {D: 12, P: 12}
    f.clock.now += 0.2
    assert f.expected(names) == {D: 12}
    f.clock.now += PLACED_S
    assert f.expected(names) == {}


async def test_while_no_announcements_come_own_notes_stay() -> None:
    """Redis away: chats still find the worker that has them."""
    f = Fixture()
    f.live = False
    names = await f.locations.names(range(12))
    f.locations.served(D, names)
    f.clock.now += 3600.0
    assert f.locations.held(names) == {D: 12}
    f.live = True
    assert f.locations.held(names) == {}


async def test_worker_that_is_gone_is_never_named() -> None:
    """O-RTR-1: affinity does not outlive membership."""
    f = Fixture()
    names = await f.locations.names(range(12))
    for worker in (P, D):
        f.locations.served(worker, names)
        f.locations.placed(worker, names)
    f.locations.follow({D: 4})
    assert f.expected(names) == {D: 12}
    f.locations.served(P, names)
    assert f.expected(names) == {D: 12}, "a report that comes late"


async def test_names_grow_with_the_output_and_are_those_of_the_whole() -> None:
    f = Fixture()
    names = await f.locations.names(range(10))
    fork = names.fork()
    names.use([*range(10), 7, 7, 7, 7])
    fork.use([*range(10), 8, 8])
    assert names.of(4) == (await f.locations.names([*range(10), 7, 7, 7, 7])).of(4)
    assert fork.of(4) == (await f.locations.names([*range(10), 8, 8])).of(4)
    assert fork.of(4) != names.of(4)[:3]
    names.use(range(10))
    assert names.of(4) == fork.of(4)[:2], "cut again"


async def test_long_prompts_are_hashed_beside_the_event_loop() -> None:
    f = Fixture()
    threads: list[threading.Thread] = []
    hash_all = module._hash

    def watched(*args: object) -> None:
        threads.append(threading.current_thread())
        hash_all(*args)  # type: ignore[arg-type]

    module._hash = watched  # type: ignore[assignment]
    try:
        for num_tokens in (HASH_INLINE_TOKENS, HASH_INLINE_TOKENS + 1):
            await f.locations.names(range(num_tokens))
    finally:
        module._hash = hash_all
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
