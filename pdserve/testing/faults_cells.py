"""One cell of the fault matrix: a prefill and a decode worker of their own, one fault, one request.

The request is tried like the router does it: a typed error leads to a newer attempt. What must hold in the end does not
depend on the fault: one attempt is decoded, from its own prompt, its own first token and exactly its own KV, block for
block in order; and nothing is left on either side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from kv_transfer import Handoff, TransferConfig
from kv_transfer.transports import TRANSPORTS
from kv_transfer.transports.base import TransportKind
from pdserve.errors import PdServeError
from pdserve.testing.faults_control import MessageFaults, control_proxy
from pdserve.testing.faults_wire import WireFaults, forwarder, through
from pdserve.testing.faulty_transport import Faults, faulty
from pdserve.testing.handoff_rig import (
    CONFIG,
    LAYOUT,
    Decode,
    Prefill,
    decode_worker,
    incarnations,
    prefill_worker,
    worker_info,
)
from pdserve.testing.waiting import eventually
from pdserve.types import DecodeTarget, GenerationJob, HandoffId, Role

CELL_CONFIG = replace(
    CONFIG,
    lease_s=2.0,
    renew_margin_s=0.5,
    peer_timeout_s=0.8,
    chunk_timeout_s=0.4,
    stall_timeout_s=1.5,
    commit_timeout_s=1.5,
    reserve_timeout_s=1.5,
    preflight=False,
)
"""Short times, so that a hundred cells take seconds."""
NUM_BLOCKS = 6
"""As many chunks, of one block each."""
QUIET_S = 5.0
"""Within which nothing of a request is left anywhere."""
_MAX_ATTEMPTS = 3
_MAX_AT_ONCE = 8
"""Cells. More of them make each other late: the times of one are those of a machine that has something left."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is different in one cell."""

    name: str
    transports: tuple[str, ...]
    """Best first; frames of the first one meet `frames`."""
    frames: Faults | None = None
    messages: MessageFaults | None = None
    tcp: WireFaults | None = None
    """Bytes of the `tcp` transport's connections meet this."""
    grpc: WireFaults | None = None
    """Bytes of all connections to the decode worker's gRPC port do."""
    kinds: tuple[TransportKind, ...] = ()
    """In place of those of the same name."""
    config: TransferConfig = CELL_CONFIG
    shared: bool = False
    """The pool of the prefill worker is in shared memory."""
    linger_s: float = 0.0
    """How long to go on looking after the request was decoded: for what arrives late."""


@dataclass
class Outcome:
    """How a request ended."""

    id: HandoffId | None
    """The attempt that the decode worker owns; None if all failed."""
    errors: list[PdServeError] = field(default_factory=list)
    """Of the attempts before, in order."""
    transports: tuple[str, ...] = ()
    num_noticed: int = 0
    """Failures of transports and damaged frames, as the statistics of both sides count them."""


def prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    """Some token ids, others for each seed."""
    return tuple((seed * 7919 + i * 31) % 50_000 for i in range(num_tokens))


async def answer(
    p: Prefill, target: DecodeTarget, blocks: Sequence[int], *, request_id: str, seed: int, first_token: int
) -> Outcome:
    """Hand a request over, with newer attempts after typed errors. Tokens become final bit by bit."""
    outcome = Outcome(None)
    num_tokens = len(blocks) * LAYOUT.block_size
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        job = GenerationJob(
            request_id=request_id,
            attempt=attempt,
            router_id="router",
            token_ids=prompt(seed, num_tokens),
            num_prompt_tokens=num_tokens,
            max_new_tokens=8,
        )
        handoff = p.sender.begin(job, target, blocks, num_tokens)
        try:
            await _hand_over(handoff, first_token)
        except PdServeError as error:
            assert error.code != "internal", error
            outcome.errors.append(error)
        else:
            outcome.id, outcome.transports = handoff.id, handoff.transports
            return outcome
        finally:
            await handoff.abort()
    return outcome


async def _hand_over(handoff: Handoff, first_token: int) -> None:
    await handoff.reserve()
    step = 2 * LAYOUT.block_size
    for frontier in range(step, handoff.plan.num_tokens + step, step):
        handoff.advance(min(frontier, handoff.plan.num_tokens))
        await asyncio.sleep(0)  # so that the link may post what is final, as while the next step computes
    await handoff.commit(first_token)


def check_owned(p: Prefill, d: Decode, blocks: Sequence[int], outcome: Outcome, *, seed: int, first_token: int) -> None:
    """The decode worker has this request, this attempt alone, and everything of it is as it was sent."""
    assert outcome.id is not None, f"every attempt failed: {outcome.errors}"
    assert d.admission.committed.get(outcome.id) == (first_token,)
    others = [h for h in d.admission.committed if h.request_id == outcome.id.request_id and h != outcome.id]
    assert not others, f"{others} are decoded beside {outcome.id}"
    job = d.admission.jobs[outcome.id]
    assert job.token_ids == prompt(seed, len(blocks) * LAYOUT.block_size)
    assert (job.max_new_tokens, job.router_id, job.num_prompt_tokens) == (8, "router", len(job.token_ids))
    here = d.admission.held[outcome.id]
    for position, (ours, theirs) in enumerate(zip(here, blocks, strict=True)):
        assert d.store.content([ours]) == p.store.content([theirs]), f"block {position} of {outcome.id} differs"


async def assert_nothing_held(p: Prefill, d: Decode) -> None:
    """Within QUIET_S no block, no hand-off and no reservation is left on either side."""
    num_blocks = d.admission.num_blocks
    await eventually(lambda: len(d.admission.free) == num_blocks, "no block is held", QUIET_S)
    await eventually(lambda: d.receiver.stats.num_live == 0, "no reservation is left", QUIET_S)
    await eventually(lambda: p.sender.stats.num_live == 0, "no hand-off is left", QUIET_S)


async def run_cell(cell: Cell, seed: int) -> Outcome:
    """The request of this cell, before it and after it another one on the same link, and all checks."""
    info = worker_info(Role.PREFILL, f"p{next(incarnations)}", transports=cell.transports)
    kinds = list(cell.kinds)
    if cell.frames is not None:
        kinds.append(faulty(TRANSPORTS[cell.transports[0]], cell.frames))
    async with AsyncExitStack() as stack:
        d = await stack.enter_async_context(
            decode_worker(
                num_blocks=4 * NUM_BLOCKS,
                config=cell.config,
                info=worker_info(Role.DECODE, f"d{next(incarnations)}", transports=cell.transports),
            )
        )
        target = d.target
        if cell.messages is not None:
            proxy = await stack.enter_async_context(control_proxy(d.target.address, cell.messages))
            target = replace(target, address=proxy.address)
        if cell.grpc is not None:
            via = await stack.enter_async_context(forwarder(cell.grpc, d.target.address))
            target = replace(target, address=via.address)
        if cell.tcp is not None:
            via = await stack.enter_async_context(forwarder(cell.tcp))
            kinds.append(through(TRANSPORTS["tcp"], via))
        p = await stack.enter_async_context(
            prefill_worker(info=info, config=cell.config, kinds=kinds, shared=cell.shared)
        )
        blocks = [(5 * i + seed) % 200 for i in range(NUM_BLOCKS)]
        p.store.fill(range(256), seed=seed)
        outcome = await answer(p, target, blocks, request_id="r", seed=seed, first_token=100 + seed)
        check_owned(p, d, blocks, outcome, seed=seed, first_token=100 + seed)
        # Whatever else the fault has left behind, the link, or the next one, serves the next request.
        others = (250, 240)
        after = await answer(p, target, others, request_id="after", seed=seed + 1, first_token=7)
        check_owned(p, d, others, after, seed=seed + 1, first_token=7)
        await asyncio.sleep(cell.linger_s)
        check_owned(p, d, blocks, outcome, seed=seed, first_token=100 + seed)
        for done in (outcome.id, after.id):
            assert done is not None
            d.finish(done)
        await assert_nothing_held(p, d)
        outcome.num_noticed = d.receiver.stats.num_bad_frames
        outcome.num_noticed += sum(totals.num_errors for totals in p.sender.stats.transports.values())
    return outcome


async def run_cells(cells: Sequence[Cell]) -> list[Outcome]:
    """A few at once. Every cell that fails is named."""
    room = asyncio.Semaphore(_MAX_AT_ONCE)

    async def run(cell: Cell, seed: int) -> Outcome:
        async with room:
            return await run_cell(cell, seed)

    runs = (run(cell, 10 + i) for i, cell in enumerate(cells))
    results = await asyncio.gather(*runs, return_exceptions=True)
    outcomes = [result for result in results if isinstance(result, Outcome)]
    errors = {c.name: r for c, r in zip(cells, results, strict=True) if isinstance(r, BaseException)}
    if errors:
        message = "; ".join(f"{name}: {error!r}" for name, error in errors.items())
        raise AssertionError(message) from next(iter(errors.values()))
    return outcomes
