"""Hand-off between workers whose blocks, shards or codecs differ, over real gRPC and through whole workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports import TRANSPORTS
from kv_transfer.transports.base import SendingTransport, TransportContext, TransportKind
from kv_transfer.wire import Frame
from pdserve.config import Config
from pdserve.errors import HandoffError
from pdserve.kv_layout import KvLayout
from pdserve.testing.cluster import test_config
from pdserve.testing.fake_engine import expected
from pdserve.testing.handoff_rig import CONFIG, decode_worker, hand_over, incarnations, prefill_worker, worker_info
from pdserve.testing.kv_elements import elements, value_of, wrong_tokens
from pdserve.testing.worker_rig import prompt_of, rig
from pdserve.types import DecodeTarget, Role
from pdserve.worker_info import WorkerInfo

LAYOUT = KvLayout(dtype="float32", block_size=16, num_layers=3, num_kv_heads=4, head_dim=4)


@pytest.fixture
def config(redis_url: str, cluster_name: str) -> Config:
    return test_config(redis_url, cluster_name)


def infos(
    prefill: KvLayout, decode: KvLayout, transport: str = "grpc", codec: str = "none"
) -> tuple[WorkerInfo, WorkerInfo]:
    p = worker_info(Role.PREFILL, f"p{next(incarnations)}", prefill, (transport,))
    d = worker_info(Role.DECODE, f"d{next(incarnations)}", decode, (transport,))
    return replace(p, codecs=(codec,)), replace(d, codecs=("none", "int8"))


@pytest.mark.parametrize("transport", ["grpc", "tcp", "memory"])
@pytest.mark.parametrize(
    ("prefill", "decode", "held"),
    [
        ({}, {"block_size": 32}, 32),
        ({"block_size": 32}, {}, 16),
        ({"block_size": 16}, {"block_size": 64}, 0),
        ({"block_size": 64}, {"block_size": 16}, 48),
        ({"k_order": "dim,token"}, {}, 16),
        ({"head_cuts": (2,)}, {}, 16),
        ({"head_cuts": (2,)}, {"head_cuts": (1, 2, 3), "block_size": 32}, 32),
        ({"head_cuts": (1, 2, 3)}, {"head_cuts": (2,)}, 0),
    ],
    ids=str,
)
async def test_every_value_arrives_where_it_belongs(
    prefill: dict[str, object], decode: dict[str, object], held: int, transport: str
) -> None:
    p_layout, d_layout = replace(LAYOUT, **prefill), replace(LAYOUT, **decode)  # type: ignore[arg-type]
    p_info, d_info = infos(p_layout, d_layout, transport)
    async with decode_worker(info=d_info) as d, prefill_worker(info=p_info) as p:
        blocks = [9, 3, 200, 41, 7, 8][: p_layout.num_blocks(90)]
        p.store.fill(blocks, seed=1)
        d.store.data[:] = 0xEE
        d.admission.num_held_tokens = held
        handoff = await hand_over(p, d, blocks, num_tokens=90)
        here = d.admission.held[handoff.id]
        assert len(here) == d_layout.num_blocks(90)
        assert wrong_tokens(p.store, blocks, d.store, here, held, 90) == set()
        assert wrong_tokens(p.store, blocks, d.store, here, 0, held) == set(range(held)), "held, so not touched"
        assert set(d.store.content(here[: held // d_layout.block_size])) <= {0xEE}
        assert not d.admission.inexact
        d.finish(handoff.id)


async def test_coded_kv_is_smaller_close_and_marked_as_inexact() -> None:
    layout = replace(LAYOUT, head_dim=16)
    p_info, d_info = infos(layout, replace(layout, block_size=32, k_order="dim,token"), "grpc", "int8")
    async with decode_worker(info=d_info) as d, prefill_worker(info=p_info) as p:
        fill_with_numbers(p.store.data)
        handoff = p.begin(d.target, range(6), num_tokens=90)
        await handoff.reserve()
        handoff.advance(90)
        result = await handoff.commit(7)
        assert result.kv_bytes == 6 * layout.num_layers * 2 * layout.num_kv_heads * (16 * 16 + 4)
        assert d.admission.inexact == {handoff.id}
        here = d.admission.held[handoff.id]
        errors = [
            abs(number(value_of(p.store, range(6), e)) - number(value_of(d.store, here, e)))
            for e in elements(layout, 0, 90)
        ]
        assert 0 < max(errors) < 5 / 127, "values are below 5"
        d.finish(handoff.id)


async def test_kv_that_cannot_be_coded_ends_its_own_hand_off_and_no_other() -> None:
    p_info, d_info = infos(LAYOUT, LAYOUT, "grpc", "int8")
    async with decode_worker(info=d_info) as d, prefill_worker(info=p_info) as p:
        fill_with_numbers(p.store.data)
        p.store.data[5] = 0xFF  # no number of float32
        with pytest.raises(HandoffError, match="not finite"):
            await hand_over(p, d, [4, 5], request_id="overflowed")
        handoff = await hand_over(p, d, [1, 2], request_id="fine")
        d.finish(handoff.id)
        assert not p.lost


def fill_with_numbers(data: np.ndarray) -> None:
    values = np.random.default_rng(1).standard_normal(data.nbytes // 4).clip(-4.9, 4.9).astype(np.float32)
    data[:] = values.view(np.uint8).reshape(data.shape)


def number(raw: bytes) -> float:
    return float(np.frombuffer(raw, np.float32)[0])


class _LyingSender:
    """Sends every chunk as another one of its kind: an intact frame that says something else than the plan."""

    def __init__(self, inner: SendingTransport, change: dict[str, int]) -> None:
        self._inner = inner
        self._change = change

    async def connect(self) -> None:
        await self._inner.connect()

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        chunk = frame.chunk
        if chunk.nonce:
            chunk = replace(chunk, **self._change)
        await self._inner.post(Frame(chunk, lambda: frame.payload), source_free)

    async def fence(self) -> None:
        await self._inner.fence()


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
@pytest.mark.parametrize(
    "change",
    [
        {"token_begin": 16, "token_end": 32},
        {"layer_begin": 1, "layer_end": 2},
        {"head_begin": 0, "head_end": 2},
        {"seq": 1},
    ],
    ids=str,
)
async def test_a_chunk_that_claims_another_place_is_refused(change: dict[str, int], transport: str) -> None:
    """The receiver's part against swapped blocks (section 0.1): a frame must say what its number stands for."""
    kind = TRANSPORTS[transport]

    def sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
        return _LyingSender(kind.sending(context, endpoint, target, link), change)

    lying: TransportKind = replace(kind, sending=sending)
    p_info, d_info = infos(LAYOUT, LAYOUT, transport)
    config = replace(CONFIG, target_chunk_bytes=LAYOUT.block_nbytes)
    async with (
        decode_worker(info=d_info, config=config) as d,
        prefill_worker(info=p_info, config=config, kinds=[lying]) as p,
    ):
        with pytest.raises(HandoffError):
            await hand_over(p, d, [1])
        assert not d.admission.committed
        assert d.receiver.stats.num_bad_frames


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 32), (32, 16), (16, 64), (64, 16), (32, 48)])
async def test_whole_workers_of_other_block_sizes_give_the_exact_tokens(
    config: Config, prefill_size: int, decode_size: int
) -> None:
    """Turns of chats of any length: what the decode worker holds ends anywhere in blocks of the prefill worker."""
    async with rig(config, prefill_block_size=prefill_size, decode_block_size=decode_size) as r:
        for salt in range(3):
            chat: tuple[int, ...] = ()
            for length in (5, 41, 18, 64):
                chat += prompt_of(length, salt)
                key = await r.submit(chat, 8)
                await r.router.finished(key)
                assert r.router.output(key) == expected(chat, 8)
                chat += tuple(expected(chat, 8))
        assert r.cluster.decode[0].stats().cached_tokens_total > 0, "turns found their beginning there"
        assert r.cluster.decode[0].stats().prefill_tokens_total == 0


@pytest.mark.parametrize("codec", ["none", "int8", "fp8"])
async def test_a_decode_worker_finds_only_exact_kv_again(redis_url: str, cluster_name: str, codec: str) -> None:
    transfer: dict[str, object] = {"codec": codec, "accept_codecs": ["none", codec]}
    async with rig(test_config(redis_url, cluster_name, transfer=transfer)) as r:
        for turn in range(2):
            key = await r.submit(prompt_of(64), 8)
            await r.router.finished(key)
            if codec == "none":
                assert r.router.output(key) == expected(prompt_of(64), 8)
            held = r.cluster.decode[0].stats().cached_tokens_total
            assert held == (48 if turn and codec == "none" else 0)
        assert r.cluster.prefill[0].stats().cached_tokens_total == 48, "the prefill worker has computed its own"


@pytest.mark.parametrize("swap", [(1, 2), (0, 3)])
async def test_two_blocks_swapped_on_the_way_change_the_tokens_of_these_tests(
    config: Config, swap: tuple[int, int]
) -> None:
    """Section 0.1: attention does not see it, so the engine of these tests weighs each token by its position."""
    async with rig(config) as r:
        prompt, store = prompt_of(70), r.prefill[0].store
        honest = store.read

        def swapped(blocks: Sequence[int], *rest: object) -> list[memoryview]:
            first, second = (own[index] for index in swap)
            other = {first: second, second: first}
            return honest([other.get(block, block) for block in blocks], *rest)  # type: ignore[arg-type]

        r.prefill[0].pause()
        key = await r.submit(prompt, 8)
        await r.prefill[0].paused()
        own = r.cluster.prefill[0]._blocks.ids(key)
        store.read = swapped  # type: ignore[method-assign]
        r.prefill[0].resume()
        await r.router.finished(key)
        assert r.router.output(key)[0] == expected(prompt, 1)[0], "drawn before the hand-off"
        assert r.router.output(key) != expected(prompt, 8)
