"""The `torch` transport between a real sender and receiver, and with a prefill process that is killed or frozen."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from subprocess import PIPE, Popen

import pytest
import torch
from torch.distributed import TCPStore

from kv_transfer.transports.torch_channel import Buffer, PairError
from kv_transfer.transports.torch_gloo import GlooChannel, gloo_group
from kv_transfer.transports.torch_kind import TORCH
from kv_transfer.transports.torch_receiver import TorchReceiver
from pdserve.kv_layout import KvLayout
from pdserve.testing.frame_sink import FrameSink
from pdserve.testing.handoff_rig import CONFIG, decode_worker, hand_over, prefill_worker, worker_info
from pdserve.testing.torch_peer import LINK, prefill_process, transport_context
from pdserve.testing.waiting import eventually
from pdserve.types import Role

ONLY_TORCH = ("torch",)
BIG_BLOCKS = KvLayout(dtype="float32", block_size=16, num_layers=8, num_kv_heads=8, head_dim=128)
"""1 MiB a block, so that a chunk of more than one is several messages."""


def torch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-torch")]


@pytest.mark.parametrize(
    ("layout", "target_chunk_bytes"), [(None, CONFIG.target_chunk_bytes), (BIG_BLOCKS, 1 << 20), (BIG_BLOCKS, 3 << 20)]
)
async def test_requests_are_handed_over_exactly(layout: KvLayout | None, target_chunk_bytes: int) -> None:
    config = replace(CONFIG, target_chunk_bytes=target_chunk_bytes, credit_bytes=8 << 20, peer_timeout_s=3.0)
    infos = {role: worker_info(role, f"torch-{role.value}", transports=ONLY_TORCH) for role in Role}
    if layout is not None:
        infos = {role: replace(info, kv_layout=layout) for role, info in infos.items()}
    async with (
        decode_worker(config=config, info=infos[Role.DECODE], num_blocks=64) as d,
        prefill_worker(config=config, info=infos[Role.PREFILL]) as p,
    ):
        for i in range(4):
            blocks = [3 * i + 1, 3 * i, 40 - i, 20 + i]
            p.store.fill(blocks, seed=i)
            handoff = await hand_over(p, d, blocks, request_id=f"r{i}")
            assert d.store.content(d.admission.held[handoff.id]) == p.store.content(blocks)
            d.finish(handoff.id)
    await eventually(lambda: not torch_threads(), "the threads of the pair have ended")


@asynccontextmanager
async def decode_side(sink: FrameSink, timeout_s: float) -> AsyncIterator[TorchReceiver]:
    receiver = TORCH.receiving(transport_context("d", timeout_s), sink)
    assert isinstance(receiver, TorchReceiver)
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.aclose()


async def test_a_prefill_process_that_is_killed_ends_the_pair_at_once() -> None:
    """SIGKILL in the middle of a stream of frames: what was not complete is never reported as such."""
    sink = FrameSink()
    async with decode_side(sink, 10.0) as receiver:
        with prefill_process(receiver, 10.0) as process:
            await eventually(lambda: len(sink.order) >= 5, "frames arrive", timeout_s=20)
            process.send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
            await eventually(lambda: not torch_threads(), "the decode side has ended")
            assert time.monotonic() - killed_at < 5, "that was the time-out, not the closed socket"
    assert sink.num_damaged == 0
    assert sink.order == list(range(len(sink.order)))


SENDS_A_LARGE_MESSAGE = """
import sys, torch
from datetime import timedelta
from torch.distributed import TCPStore
from kv_transfer.transports.torch_channel import Buffer
from kv_transfer.transports.torch_envelope import ENVELOPE_NBYTES
from kv_transfer.transports.torch_gloo import GlooChannel, gloo_group
port, nbytes = map(int, sys.argv[1:])
store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
channel = GlooChannel(gloo_group(store, "pair", 0, "127.0.0.1", 20.0), 1)
channel.send(Buffer(torch.ones(nbytes, dtype=torch.uint8)), nbytes - ENVELOPE_NBYTES).wait()
sys.stdin.read()
"""


def test_a_message_of_which_a_part_has_come_ends_with_its_peer_and_not_with_the_time_out() -> None:
    nbytes, timeout_s = 256 << 20, 20.0
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    command = [sys.executable, "-c", SENDS_A_LARGE_MESSAGE, str(store.port), str(nbytes)]
    with Popen(command, stdin=PIPE) as process:
        try:
            channel = GlooChannel(gloo_group(store, "pair", 1, "127.0.0.1", timeout_s), 0)
            arriving = torch.zeros(nbytes, dtype=torch.uint8)
            pending = channel.recv(Buffer(arriving))
            deadline = time.monotonic() + timeout_s
            while not arriving[1 << 20]:
                assert time.monotonic() < deadline, "nothing comes"
            process.send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
            with pytest.raises(PairError):
                pending.wait()
        finally:
            process.kill()
    assert time.monotonic() - killed_at < timeout_s / 2, "that was the time-out, not the closed socket"
    assert not arriving[-1], "the whole message had come"


async def test_a_prefill_process_that_is_frozen_holds_a_fenced_link_for_one_time_out() -> None:
    sink = FrameSink()
    async with decode_side(sink, 1.0) as receiver:
        with prefill_process(receiver, 1.0) as process:
            await eventually(lambda: len(sink.order) >= 5, "frames arrive", timeout_s=20)
            process.send_signal(signal.SIGSTOP)
            receiver.fence(LINK)
            num_landed = len(sink.order)
            await eventually(lambda: not torch_threads(), "the decode side has ended", timeout_s=6)
            assert len(sink.order) <= num_landed + 1, "frames were stored after the fence"
