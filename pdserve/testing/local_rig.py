"""Both ends of the `local` transport for tests: a decode side in this process, and the other side as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.local_receiver import LocalReceiver
from kv_transfer.transports.local_sender import LocalSender
from kv_transfer.transports.local_wire import where_am_i
from kv_transfer.wire import ChunkHeader
from pdserve.testing.local_peer import LINK, NUM_PIECES, RecordingSink, content
from pdserve.testing.waiting import eventually

OTHER_LINK = LinkId("other prefill", 1)
HERE = Endpoint("local", where_am_i())


@dataclass
class Decode:
    """The decode side in this process."""

    receiver: LocalReceiver
    sink: RecordingSink
    senders: list[LocalSender] = field(default_factory=list)

    def attributes(self, link: LinkId = LINK, *, mode: str | None = None) -> dict[str, str]:
        """Of the endpoint for a new link."""
        endpoint = self.receiver.open(link, HERE)
        assert endpoint is not None
        return {**endpoint.attributes, **({} if mode is None else {"mode": mode})}

    async def sender(
        self,
        link: LinkId = LINK,
        *,
        mode: str | None = None,
        at_once: bool = False,
        num_pieces: Callable[[ChunkHeader], int] = lambda chunk: NUM_PIECES,
    ) -> LocalSender:
        """A connected prefill side in this process."""
        attributes = self.attributes(link, mode=mode)
        sender = LocalSender(attributes, "the decode worker", num_pieces=num_pieces if at_once else None)
        self.senders.append(sender)
        await sender.connect()
        return sender


@asynccontextmanager
async def decode_side() -> AsyncIterator[Decode]:
    """A decode side, and the end of all that it was connected to."""
    sink = RecordingSink()
    decode = Decode(LocalReceiver("decode", sink), sink)
    await decode.receiver.start()
    try:
        yield decode
    finally:
        sink.gate.set()
        for sender in decode.senders:
            await sender.fence()
        await decode.receiver.aclose()


class Freed:
    """Counts how often each source was given back."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def of(self, seq: int) -> _Free:
        """`source_free` for one chunk."""
        return _Free(self, seq)

    def exactly(self, *seqs: int) -> bool:
        """Whether these, and no others, were given back, each once."""
        return self.counts == dict.fromkeys(seqs, 1)


@dataclass
class _Free:
    freed: Freed
    seq: int

    def __call__(self) -> None:
        self.freed.counts[self.seq] = self.freed.counts.get(self.seq, 0) + 1


def contents(seed: int, num: int) -> dict[int, bytes]:
    """What the first `num` chunks of a seed are."""
    return {seq: content(seed, seq) for seq in range(num)}


class Peer:
    """The other side, as a process."""

    def __init__(self, *arguments: str, forbid_ptrace: bool = False) -> None:
        environment = {**os.environ, **({"FORBID_PTRACE": "1"} if forbid_ptrace else {})}
        self.process = subprocess.Popen(
            (sys.executable, "-m", "pdserve.testing.local_peer", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    async def line(self, timeout_s: float = 20.0) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    def say(self, *lines: str) -> None:
        """Write these lines to it."""
        assert self.process.stdin is not None
        for line in lines:
            self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    async def freeze(self) -> None:
        """Stop it, and return when each of its threads stands still."""
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")

        def is_frozen() -> bool:
            stats = [(thread / "stat").read_text() for thread in threads.iterdir()]
            return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

        await eventually(is_frozen, "the process stands still")

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """End it at once, and return when it is gone."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    def close(self) -> None:
        """Let it end, and make it if it does not."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@contextmanager
def peer(*arguments: str, forbid_ptrace: bool = False) -> Iterator[Peer]:
    """A process that ends with the block."""
    other = Peer(*arguments, forbid_ptrace=forbid_ptrace)
    try:
        yield other
    finally:
        other.thaw()
        other.close()
