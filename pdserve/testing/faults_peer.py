"""A prefill or decode worker as a process of its own, without an engine, to be killed and frozen by a test.

`python -m pdserve.testing.faults_peer decode PORT INCARNATION SECONDS` serves hand-offs at that port of loopback until
its input ends; what it has committed ends by itself after SECONDS. It prints "ready PORT" first.

`python -m pdserve.testing.faults_peer prefill WORKER_ID INCARNATION ADDRESS NAME SHARE` hands over request NAME to the
decode worker of these names: it computes SHARE of the prompt and, if that is all, commits. It prints what it has come
to: "reserved", "computed", then "committed", or "failed CODE".

Both use the times of a default deployment.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from subprocess import PIPE, Popen

from kv_transfer import TransferConfig
from kv_transfer.settings import transfer_config
from pdserve.config import Config
from pdserve.errors import PdServeError
from pdserve.testing.handoff_rig import LAYOUT, Prefill, decode_worker, prefill_worker, worker_info
from pdserve.types import DecodeTarget, HandoffId, Role

NUM_BLOCKS = 8
"""Of the request of a prefill process, each a chunk."""
BLOCKS = range(10, 10 + NUM_BLOCKS)
SEED = 77
"""Of its KV."""
TRANSPORTS = ("local", "tcp", "grpc")


def default_config() -> TransferConfig:
    """Of a deployment that sets nothing, but with chunks of one of our small blocks."""
    return replace(transfer_config(Config()), target_chunk_bytes=LAYOUT.block_nbytes)


@contextmanager
def peer(*arguments: str) -> Iterator[Popen[str]]:
    """A process of this module. It is killed in the end, if it still runs."""
    command = [sys.executable, "-m", __name__, *arguments]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: Popen[str]) -> str:
    """The next line that it prints; empty once it has ended. Blocks."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def _decode(port: int, incarnation: str, seconds: float) -> None:
    info = worker_info(Role.DECODE, incarnation, transports=TRANSPORTS)
    async with decode_worker(info=info, config=default_config(), port=port) as d:
        _say(f"ready {d.target.address.rsplit(':', 1)[1]}")
        reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        since: dict[HandoffId, float] = {}
        while not reading.done():
            await asyncio.wait((reading,), timeout=0.02)
            for handoff in list(d.admission.committed):
                if time.monotonic() - since.setdefault(handoff, time.monotonic()) >= seconds:
                    d.finish(handoff)


async def _prefill(target: DecodeTarget, name: str, share: float) -> None:
    info = worker_info(Role.PREFILL, f"process-{name}", transports=TRANSPORTS)
    async with prefill_worker(info=info, config=default_config(), shared=True) as p:
        reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        p.store.fill(BLOCKS, seed=SEED)
        try:
            await _hand_over(p, target, name, share, reading)
        except PdServeError as error:
            _say(f"failed {error.code}")
        await reading


async def _hand_over(p: Prefill, target: DecodeTarget, name: str, share: float, end: asyncio.Task[str]) -> None:
    handoff = p.begin(target, BLOCKS, request_id=name)
    await handoff.reserve()
    _say("reserved")
    handoff.advance(int(handoff.plan.num_tokens * share))
    _say("computed")
    if share == 1:
        await handoff.commit(7)
        _say("committed")
        return
    while not handoff.ended and not end.done():
        await asyncio.wait((end,), timeout=0.02)
    await handoff.abort()
    if handoff.failure is not None:
        _say(f"failed {handoff.failure.code}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "decode":
        asyncio.run(_decode(int(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
    else:
        worker_id, incarnation, address, name, share = sys.argv[2:]
        target = DecodeTarget(worker_id=worker_id, incarnation=incarnation, address=address)
        asyncio.run(_prefill(target, name, float(share)))
