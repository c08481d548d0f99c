"""The `torch` transport over NCCL: two processes, each with a GPU of its own if there are two."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from subprocess import Popen

import pytest
import torch

from kv_transfer.transports import torch_receiver
from kv_transfer.transports.torch_join import NCCL, abilities
from kv_transfer.transports.torch_kind import TORCH
from pdserve.testing.frame_sink import FrameSink, random_frame
from pdserve.testing.torch_peer import LINK, NBYTES, prefill_process, transport_context
from pdserve.testing.waiting import eventually

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TIMEOUT_S = 20.0


@dataclass
class Running:
    """A prefill process that posts frames to a sink of this one."""

    sink: FrameSink
    process: Popen[str]


def num_threads() -> int:
    return sum(thread.name.startswith("kv-torch") for thread in threading.enumerate())


@asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Running]:
    """Skips, with NCCL's reason, where it refuses two ranks on the only GPU."""
    monkeypatch.setattr(torch_receiver, "choose_backend", lambda prefill, decode: NCCL)
    sink = FrameSink()
    receiver = TORCH.receiving(transport_context("d", TIMEOUT_S, "cuda:0"), sink)
    await receiver.start()
    try:
        with prefill_process(receiver, TIMEOUT_S, f"cuda:{torch.cuda.device_count() - 1}") as process:
            await eventually(
                lambda: len(sink.order) >= 5 or num_threads() == 0, "frames arrive", timeout_s=3 * TIMEOUT_S
            )
            if not sink.order and torch.cuda.device_count() == 1:
                pytest.skip(f"NCCL does not connect two ranks on one GPU: {caplog.text}")
            yield Running(sink, process)
    finally:
        await receiver.aclose()


async def test_frames_arrive_exactly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with running(monkeypatch, caplog) as pair:
        await eventually(lambda: len(pair.sink.order) >= 200, "frames arrive", timeout_s=60)
        for seq in itertools.islice(pair.sink.order, 200):
            assert pair.sink.frames[LINK, seq] == b"".join(random_frame(seq, [NBYTES]).payload)
        assert pair.sink.num_damaged == 0


async def test_a_killed_peer_ends_the_pair(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The verdict comes from gloo's closed socket; the communicator is aborted, and this process goes on."""
    async with running(monkeypatch, caplog) as pair:
        pair.process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        await eventually(lambda: num_threads() == 0, "the decode side has ended", timeout_s=2 * TIMEOUT_S)
        assert time.monotonic() - killed_at < TIMEOUT_S + 5
        assert torch.ones(3, device="cuda:0").sum().item() == 3, "the device is not usable any more"


def test_a_worker_says_which_gpu_and_nccl_it_has() -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    offer = abilities(torch.device("cuda:0"))
    assert offer["nccl"].count(".") == 2 and offer["gpu"]
