"""The fault matrix with the times of a default deployment and stalls of ten seconds, and a hundred kills in a row.

The plain run has the short forms, in tests/component/test_handoff_faults*.py and tests/process/test_handoff_*.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.testing.faults_cells import NUM_BLOCKS, Cell, run_cells
from pdserve.testing.faults_control import MessageFaults
from pdserve.testing.faults_leaks import nothing_left
from pdserve.testing.faults_peer import default_config
from pdserve.testing.faults_restarts import assert_no_leak, kill_decode_workers, kill_prefill_workers
from pdserve.testing.faults_wire import WireFault, WireFaults
from pdserve.testing.faulty_transport import Fault, Faults
from pdserve.testing.handoff_rig import LAYOUT

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(1200)]

STALL_S = 10.0
NUM_KILLS = 100
TRANSPORTS = (("memory", "grpc"), ("grpc", "tcp"), ("tcp", "grpc"), ("local", "tcp"))
MESSAGES = ("reserve", "grant", "chunk_ack", "commit", "commit_ack")
CONFIG = replace(default_config(), preflight=False, target_chunk_bytes=LAYOUT.block_nbytes, tail_tokens=0)


@pytest.mark.parametrize("transports", TRANSPORTS, ids=lambda t: t[0])
async def test_chunks_that_stand_still_for_ten_seconds(transports: tuple[str, ...]) -> None:
    """O-KVT-2."""
    cells = []
    for place in (0, NUM_BLOCKS // 2, NUM_BLOCKS - 1):
        for names in (transports, transports[:1]):
            faults = Faults([Fault.NONE] * place + [Fault.DELAY], delay_s=STALL_S)
            cells.append(Cell(name=f"{place} over {names}", transports=names, frames=faults, config=CONFIG))
    async with nothing_left():
        await run_cells(cells)


@pytest.mark.parametrize("transport", ["memory", "tcp", "local"])
async def test_messages_that_stand_still_for_ten_seconds(transport: str) -> None:
    """O-KVT-2."""
    cells = [
        Cell(
            name=f"{kind} after {num_good}",
            transports=(transport,),
            messages=MessageFaults(kind, Fault.DELAY, num_good=num_good, delay_s=STALL_S),
            config=CONFIG,
        )
        for kind in MESSAGES
        for num_good in ((0, NUM_BLOCKS - 1) if kind == "chunk_ack" else (0,))
    ]
    async with nothing_left():
        await run_cells(cells)


async def test_connections_that_stand_still_for_ten_seconds_and_go_on() -> None:
    """O-KVT-2, O-ABT-3: what comes ten seconds late changes nothing."""
    total = NUM_BLOCKS * LAYOUT.block_nbytes
    cells = []
    for share in (0.01, 0.5, 0.99):
        wires = [WireFaults(WireFault.STALL, after_nbytes=int(share * total), delay_s=STALL_S) for _ in range(3)]
        cells += [
            Cell(
                name=f"tcp and grpc {share}", transports=("tcp", "grpc"), tcp=wires[0], config=CONFIG, linger_s=STALL_S
            ),
            Cell(name=f"tcp {share}", transports=("tcp",), tcp=wires[1], config=CONFIG, linger_s=STALL_S),
            Cell(name=f"grpc {share}", transports=("grpc",), grpc=wires[2], config=CONFIG, linger_s=STALL_S),
        ]
    async with nothing_left():
        await run_cells(cells)


async def test_a_hundred_decode_workers_are_killed() -> None:
    before, after = await kill_decode_workers(NUM_KILLS)
    assert_no_leak(before, after, NUM_KILLS)


async def test_a_hundred_prefill_workers_are_killed() -> None:
    before, after = await kill_prefill_workers(NUM_KILLS)
    assert_no_leak(before, after, NUM_KILLS)
