"""Both ends of KV hand-off over real gRPC on loopback, with pools of plain bytes in place of engines."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from kv_transfer import Busy, Handoff, HandoffReceiver, HandoffSender, Room, TransferConfig
from kv_transfer.transports import TRANSPORTS
from kv_transfer.transports.base import TransportKind
from pdserve.errors import PdServeError
from pdserve.kv_layout import KvLayout
from pdserve.rpc.options import SERVER_OPTIONS
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.types import DecodeTarget, GenerationJob, HandoffId, HandoffPurpose, Role
from pdserve.worker_info import WorkerInfo

LAYOUT = KvLayout(dtype="float32", block_size=16, num_layers=4, num_kv_heads=2, head_dim=16)
"""4 KiB a layer, 16 KiB a block."""
CONFIG = TransferConfig(
    heartbeat_s=0.1,
    peer_timeout_s=0.6,
    reconnect_s=0.3,
    lease_s=5,
    renew_margin_s=1.5,
    resend_s=0.1,
    reserve_timeout_s=3,
    stall_timeout_s=3,
    commit_timeout_s=3,
    target_chunk_bytes=16 << 10,
    credit_bytes=64 << 10,
)
incarnations = itertools.count(1)
"""Makes names of worker processes unique."""


def worker_info(
    role: Role, incarnation: str, layout: KvLayout = LAYOUT, transports: Sequence[str] = ("grpc",)
) -> WorkerInfo:
    """A worker that fits every other one made here."""
    return WorkerInfo(
        worker_id=f"{role.value}-1",
        incarnation=incarnation,
        role=role,
        address="127.0.0.1:1",
        model="m",
        model_fingerprint="f",
        kv_layout=layout,
        num_blocks=256,
        max_model_len=4096,
        transports=tuple(transports),
        version="0",
    )


class CountingAdmission:
    """A decode worker that keeps blocks and nothing else."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.held: dict[HandoffId, list[int]] = {}
        self.committed: dict[HandoffId, tuple[int, ...]] = {}
        """With the first tokens."""
        self.jobs: dict[HandoffId, GenerationJob] = {}
        """Of every hand-off that was ever reserved."""
        self.superseded: list[HandoffId] = []
        self.inexact: set[HandoffId] = set()
        """Those that came through a lossy codec."""
        self.refusal: PdServeError | None = None
        self.num_held_tokens = 0
        """What it claims to hold already of every hand-off."""

    def reserve(self, job: HandoffPurpose, handoff: HandoffId, num_tokens: int) -> Room | Busy:
        """See `Admission`."""
        if self.refusal is not None:
            raise self.refusal
        assert isinstance(job, GenerationJob) and handoff not in self.held
        n = self.layout.num_blocks(num_tokens)
        if n > len(self.free):
            return Busy(handoff, 0.25)
        self.held[handoff] = [self.free.pop() for _ in range(n)]
        self.jobs[handoff] = job
        return Room(tuple(self.held[handoff]), self.num_held_tokens)

    def release(self, handoff: HandoffId) -> None:
        """See `Admission`."""
        assert handoff not in self.committed
        self.free += self.held.pop(handoff)

    def commit(self, handoff: HandoffId, first_tokens: tuple[int, ...], *, exact: bool) -> None:
        """See `Admission`."""
        assert handoff in self.held and handoff not in self.committed
        if not exact:
            self.inexact.add(handoff)
        self.committed[handoff] = first_tokens

    def supersede(self, handoff: HandoffId) -> None:
        """See `Admission`."""
        self.superseded.append(handoff)
        self.drop(handoff)

    def drop(self, handoff: HandoffId) -> None:
        """End a committed request."""
        del self.committed[handoff]
        self.free += self.held.pop(handoff)


@dataclass
class Decode:
    """A decode worker process, as far as hand-off goes."""

    receiver: HandoffReceiver
    store: NumpyBlockStore
    admission: CountingAdmission
    server: grpc.aio.Server
    target: DecodeTarget
    stopped: bool = False

    def finish(self, handoff: HandoffId) -> None:
        """The committed request has been decoded."""
        self.admission.drop(handoff)
        self.receiver.finished(handoff)

    async def stop(self) -> None:
        """End in good order."""
        if not self.stopped:
            self.stopped = True
            await self.receiver.aclose()
            await self.server.stop(0)


@dataclass
class Prefill:
    """A prefill worker process, as far as hand-off goes."""

    sender: HandoffSender
    store: NumpyBlockStore
    lost: list[tuple[DecodeTarget, PdServeError]] = field(default_factory=list)

    def begin(
        self,
        target: DecodeTarget,
        blocks: Sequence[int],
        *,
        request_id: str = "r",
        attempt: int = 1,
        num_tokens: int = 0,
    ) -> Handoff:
        """A hand-off of these blocks; without `num_tokens` they are all full."""
        n = num_tokens or len(blocks) * self.store.layout.block_size
        job = GenerationJob(
            request_id=request_id,
            attempt=attempt,
            router_id="router",
            token_ids=tuple(range(n)),
            num_prompt_tokens=n,
            max_new_tokens=8,
        )
        return self.sender.begin(job, target, blocks, n)


@asynccontextmanager
async def decode_worker(
    *,
    num_blocks: int = 256,
    config: TransferConfig = CONFIG,
    info: WorkerInfo | None = None,
    port: int = 0,
) -> AsyncIterator[Decode]:
    """A decode worker; in the end it must hold no block and no reservation."""
    info = info or worker_info(Role.DECODE, f"d{next(incarnations)}")
    store = NumpyBlockStore(info.kv_layout, num_blocks)
    admission = CountingAdmission(info.kv_layout, num_blocks)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    receiver = HandoffReceiver(info=info, store=store, admission=admission, config=config)
    receiver.register(server)
    await server.start()
    await receiver.start()
    target = DecodeTarget(worker_id=info.worker_id, incarnation=info.incarnation, address=f"127.0.0.1:{bound}")
    worker = Decode(receiver, store, admission, server, target)
    try:
        yield worker
    finally:
        await worker.stop()
        for handoff in list(admission.committed):
            admission.drop(handoff)
        assert len(admission.free) == num_blocks, "blocks are left at the decode worker"
        assert receiver.stats.num_live == 0


@asynccontextmanager
async def prefill_worker(
    *,
    config: TransferConfig = CONFIG,
    info: WorkerInfo | None = None,
    kinds: Sequence[TransportKind] = (),
    shared: bool = False,
) -> AsyncIterator[Prefill]:
    """A prefill worker, with `kinds` in place of the transports of the same names, and its pool in shared memory if
    `shared`."""
    info = info or worker_info(Role.PREFILL, f"p{next(incarnations)}")
    store = NumpyBlockStore(info.kv_layout, 256, shared=shared)
    lost: list[tuple[DecodeTarget, PdServeError]] = []
    transports = {name: TRANSPORTS[name] for name in info.transports} | {kind.name: kind for kind in kinds}
    sender = HandoffSender(
        info=info,
        store=store,
        config=config,
        on_link_lost=lambda target, error: lost.append((target, error)),
        transports=transports,
    )
    try:
        yield Prefill(sender, store, lost)
    finally:
        await sender.aclose()
        stats = sender.stats
        assert (stats.num_live, stats.num_links) == (0, 0)


async def hand_over(
    p: Prefill, d: Decode, blocks: Sequence[int], *, request_id: str = "r", attempt: int = 1, num_tokens: int = 0
) -> Handoff:
    """A whole hand-off, until the decode worker owns the request."""
    handoff = p.begin(d.target, blocks, request_id=request_id, attempt=attempt, num_tokens=num_tokens)
    await handoff.reserve()
    handoff.advance(handoff.plan.num_tokens)
    await handoff.commit(7)
    return handoff
