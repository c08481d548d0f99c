"""The fault matrix of the hand-off: what can happen to a message or a chunk, at each step, over each transport.

Every cell asks the same: the request ends once, decoded from exactly its own KV, prompt and first token, and soon
afterwards nothing of it is held anywhere. Times are short here; `tests/chaos` has the long form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kv_transfer.transports import TRANSPORTS
from pdserve.testing.faults_cells import CELL_CONFIG, NUM_BLOCKS, Cell, run_cells
from pdserve.testing.faults_control import MessageFaults
from pdserve.testing.faults_leaks import nothing_left, unexpected_errors
from pdserve.testing.faults_swap import Swaps, swapping
from pdserve.testing.faulty_transport import Fault, Faults
from pdserve.testing.handoff_rig import LAYOUT

STALL_S = 2 * CELL_CONFIG.peer_timeout_s
"""Longer than everything that waits for a message."""
FAULTS = {
    "drop": (Fault.DROP, 0.0),
    "duplicate": (Fault.REPEAT, 0.0),
    "reorder": (Fault.REORDER, 0.0),
    "delay": (Fault.DELAY, 0.1),
    "truncate": (Fault.TRUNCATE, 0.0),
    "flip": (Fault.FLIP, 0.0),
    "stall": (Fault.DELAY, STALL_S),
    "cut": (Fault.BREAK, 0.0),
}
CHUNKS = {"first": 0, "middle": NUM_BLOCKS // 2, "last": NUM_BLOCKS - 1}
MESSAGES = {
    "hello": ("hello", 0),
    "welcome": ("welcome", 0),
    "reserve": ("reserve", 0),
    "grant": ("grant", 0),
    "first ack": ("chunk_ack", 0),
    "last ack": ("chunk_ack", NUM_BLOCKS - 1),
    "commit": ("commit", 0),
    "commit ack": ("commit_ack", 0),
}
FALLBACKS = {"memory": ("memory", "grpc"), "grpc": ("grpc", "tcp"), "tcp": ("tcp", "grpc"), "local": ("local", "tcp")}


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert unexpected_errors(caplog.get_records("call")) == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("transport", FALLBACKS)
async def test_a_chunk_that_meets_a_fault(transport: str, fault: str) -> None:
    """O-KVT-2, O-ABT-3: with another transport to fall back to, and without."""
    kind, delay_s = FAULTS[fault]
    cells: list[Cell] = []
    for place, num_good in CHUNKS.items():
        for transports in (FALLBACKS[transport], (transport,)):
            faults = Faults([Fault.NONE] * num_good + [kind], seed=len(cells), delay_s=delay_s)
            cells.append(Cell(name=f"{place} chunk over {transports}", transports=transports, frames=faults))
    async with nothing_left():
        outcomes = await run_cells(cells)
    assert [cell.name for cell in cells if cell.frames is None or cell.frames.num_injected == 0] == []
    if fault in ("truncate", "flip", "stall", "cut"):
        assert all(outcome.num_noticed > 0 for outcome in outcomes), "a fault that no counter shows"


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_chunk_out_of_shared_memory_that_meets_a_fault(fault: str) -> None:
    """O-KVT-2, O-ABT-3: `local` copies the others of its chunks out of a mapped pool."""
    kind, delay_s = FAULTS[fault]
    cells = [
        Cell(
            name=f"{place} chunk",
            transports=FALLBACKS["local"],
            frames=Faults([Fault.NONE] * num_good + [kind], seed=num_good, delay_s=delay_s),
            shared=True,
        )
        for place, num_good in CHUNKS.items()
    ]
    async with nothing_left():
        await run_cells(cells)
    assert [cell.name for cell in cells if cell.frames is None or cell.frames.num_injected == 0] == []


@pytest.mark.parametrize("fault", ["drop", "duplicate", "flip", "stall", "cut"])
async def test_a_chunk_over_torch_that_meets_a_fault(fault: str) -> None:
    """O-KVT-2: the short form, as each pair takes a process group and its threads."""
    kind, delay_s = FAULTS[fault]
    config = replace(CELL_CONFIG, peer_timeout_s=2.0)
    cells = [
        Cell(
            name=f"chunk {num_good}",
            transports=("torch", "tcp"),
            frames=Faults([Fault.NONE] * num_good + [kind], seed=num_good, delay_s=delay_s),
            config=config,
        )
        for num_good in CHUNKS.values()
    ]
    async with nothing_left():
        await run_cells(cells)
    assert [cell.name for cell in cells if cell.frames is None or cell.frames.num_injected == 0] == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("transport", ["memory", "tcp"])
async def test_a_control_message_that_meets_a_fault(transport: str, fault: str) -> None:
    """O-KVT-2."""
    kind, delay_s = FAULTS[fault]
    num_seeds = 4 if kind in (Fault.FLIP, Fault.TRUNCATE) else 1
    cells = [
        Cell(
            name=f"{message} (seed {seed})",
            transports=(transport,),
            messages=MessageFaults(name, kind, num_good=num_good, delay_s=delay_s, seed=seed),
        )
        for message, (name, num_good) in MESSAGES.items()
        for seed in range(num_seeds)
    ]
    async with nothing_left():
        await run_cells(cells)
    assert [cell.name for cell in cells if cell.messages is None or cell.messages.num_injected == 0] == []


@pytest.mark.parametrize("transport", FALLBACKS)
async def test_swapped_blocks_are_caught(transport: str) -> None:
    """On the way by the checksum, which knows where a chunk belongs; before it was taken by the check of all cells."""
    config = replace(CELL_CONFIG, target_chunk_bytes=2 * LAYOUT.block_nbytes, tail_tokens=0)
    for sealed in (False, True):
        swaps = Swaps(sealed=sealed, num_tokens=2 * LAYOUT.block_size)
        kind = swapping(TRANSPORTS[transport], swaps)
        cell = Cell(name="swapped", transports=FALLBACKS[transport], kinds=(kind,), config=config)
        async with nothing_left():
            if sealed:
                with pytest.raises(AssertionError, match="block 0 of r#1 differs"):
                    await run_cells([cell])
            else:
                (outcome,) = await run_cells([cell])
                assert outcome.transports == FALLBACKS[transport]
        assert swaps.num_frames > 0
