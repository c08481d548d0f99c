"""O-KVT-2 on the bytes of real connections: refused, cut, stalled, slowed or damaged at some place of a hand-off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdserve.testing.faults_cells import CELL_CONFIG, NUM_BLOCKS, Cell, run_cells
from pdserve.testing.faults_leaks import nothing_left, unexpected_errors
from pdserve.testing.faults_wire import WireFault, WireFaults
from pdserve.testing.handoff_rig import LAYOUT

SHARES = (0.0005, 0.01, 0.25, 0.5, 0.75, 0.99)
"""Of the bytes of a hand-off; the first one is in the middle of the greeting."""
NUM_NBYTES = NUM_BLOCKS * LAYOUT.block_nbytes
STALL_S = 2 * CELL_CONFIG.chunk_timeout_s
DELAY_S = {WireFault.STALL: STALL_S, WireFault.SLOW: 0.02}
BROKEN = (WireFault.CUT, WireFault.STALL, WireFault.FLIP)


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert unexpected_errors(caplog.get_records("call")) == []


def faults_of(fault: WireFault) -> list[WireFaults]:
    """One for each place at which it can happen."""
    places = SHARES if fault in BROKEN else (0.0,)
    return [WireFaults(fault, after_nbytes=int(s * NUM_NBYTES), delay_s=DELAY_S.get(fault, 0.0)) for s in places]


@pytest.mark.parametrize("fault", [f for f in WireFault if f is not WireFault.NONE])
async def test_the_connection_of_the_tcp_transport_meets_a_fault(fault: WireFault) -> None:
    """With grpc to fall back to and, but for a port that refuses everything, without.

    What stalls goes on after the hand-off is over: the late bytes of a transport that was given up change nothing.
    """
    wires = faults_of(fault)
    cells = [Cell(name=f"{w} of two", transports=("tcp", "grpc"), tcp=w, linger_s=w.delay_s) for w in wires]
    if fault is not WireFault.REFUSE:
        cells += [Cell(name=f"{w} alone", transports=("tcp",), tcp=w, linger_s=w.delay_s) for w in faults_of(fault)]
    async with nothing_left():
        outcomes = await run_cells(cells)
    assert [cell.name for cell in cells if cell.tcp is None or cell.tcp.num_injected == 0] == []
    if fault in (WireFault.REFUSE, WireFault.CUT, WireFault.STALL):
        # A greeting that is only late does no harm.
        broken = [i for i, c in enumerate(cells) if "grpc" in c.transports and c.tcp is not wires[0]]
        assert all(outcomes[i].transports[-1] == "grpc" for i in broken)


@pytest.mark.parametrize("fault", [f for f in WireFault if f not in (WireFault.NONE, WireFault.REFUSE)])
@pytest.mark.parametrize("transport", ["grpc", "memory"])
async def test_the_connections_to_the_grpc_port_meet_a_fault(transport: str, fault: WireFault) -> None:
    """Control stream and, for `grpc`, chunks as well. gRPC tells nobody of a flipped bit in what it carries."""
    wires = faults_of(fault)
    if transport == "memory":
        # Only control messages pass here: some hundred bytes to begin with.
        wires = [
            replace(wire, after_nbytes=at) for wire, at in zip(wires * 5, (30, 200, 400, 600, 800, 1000), strict=False)
        ]
    cells = [Cell(name=f"{wire.after_nbytes} bytes", transports=(transport,), grpc=wire) for wire in wires]
    async with nothing_left():
        await run_cells(cells)
    assert [cell.name for cell in cells if cell.grpc is None or cell.grpc.num_injected == 0] == []
