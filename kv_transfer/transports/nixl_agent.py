"""What is used of NIXL: agents without a progress thread, and rings of staging buffers that peers write into.

Without a progress thread nothing moves unless somebody asks, so both sides poll; NIXL's own threads would each keep a
core busy. Agents are not thread-safe.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch

from kv_transfer.transports.torch_channel import MESSAGE_NBYTES, Buffer, PairError
from kv_transfer.transports.torch_envelope import ENVELOPE_NBYTES

_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
"""The meta-package, and what it installs for each version of CUDA. They run on machines without a GPU too."""
_LOCAL = "NIXL_INIT_AGENT"
GRANULE_NBYTES = 64 << 10
"""Length of a descriptor. A message takes as many as it needs; neighbours are merged into one write."""
GRANULES_PER_SLOT = -(-(ENVELOPE_NBYTES + MESSAGE_NBYTES) // GRANULE_NBYTES)
SLOT_NBYTES = GRANULES_PER_SLOT * GRANULE_NBYTES
_POLL_S = (20e-6, 1e-3)
"""First and longest pause between polls of a wait."""

Handle = Any
"""Opaque objects of NIXL, which has no type stubs."""
T = TypeVar("T")


class Agent(Protocol):
    """The part of `nixl_agent` that is used."""

    def register_memory(self, regions: Sequence[tuple[int, int, int, str]], mem_type: str, /) -> Handle:
        """Make memory known: (address, length, device, name)."""

    def prep_xfer_dlist(self, agent: str, regions: Sequence[tuple[int, int, int]], mem_type: str, /) -> Handle:
        """Descriptors to pick from by index."""

    def make_prepped_xfer(
        self, operation: str, local: Handle, local_at: list[int], remote: Handle, remote_at: list[int], note: bytes, /
    ) -> Handle:
        """A transfer, of which the remote agent gets `note` when it is complete."""

    def transfer(self, handle: Handle, /) -> str:
        """Start it: DONE, PROC or ERR."""

    def check_xfer_state(self, handle: Handle, /) -> str:
        """How it is, after some progress."""

    def get_agent_metadata(self) -> bytes:
        """How others reach this agent and its registered memory."""

    def add_remote_agent(self, metadata: bytes, /) -> str | bytes:
        """Learn of another agent; its name."""

    def remove_remote_agent(self, name: str, /) -> None:
        """Forget it and disconnect."""

    def send_notif(self, name: str, note: bytes, /) -> None:
        """Send a few bytes."""

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """What others have sent, by their names, after some progress."""


def require_package() -> str:
    """Name of the installed package. Raises ImportError if there is none."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is not None:
            return package
    raise ImportError(f"none of {', '.join(_PACKAGES)} is installed")


def new_agent(name: str) -> Agent:
    """An agent that uses UCX. Takes up to a second. Raises ImportError without the package."""
    api = importlib.import_module(f"{require_package()}._api")
    config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    return cast(Agent, api.nixl_agent(name, config))


def name_of(name: str | bytes) -> str:
    """NIXL gives names back as either."""
    return name.decode() if isinstance(name, bytes) else name


def call(function: Callable[[], T]) -> T:
    """Call into NIXL. Its exceptions have no base class of their own; they become PairError."""
    try:
        return function()
    except PairError:
        raise
    except Exception as error:
        raise PairError(f"NIXL: {type(error).__name__} {error}") from error


def poll(is_complete: Callable[[], bool], interrupted: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Call `is_complete` until it is true. Raises PairError when interrupted or after `timeout_s`."""
    pause_s, longest_s = _POLL_S
    deadline = time.monotonic() + timeout_s
    while not is_complete():
        if interrupted():
            raise PairError("the pair was closed")
        if time.monotonic() > deadline:
            raise PairError(f"{what} within {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)


class Ring:
    """Registered memory for `num_slots` messages, in order."""

    def __init__(self, agent: Agent, num_slots: int) -> None:
        self._memory = torch.zeros(num_slots * SLOT_NBYTES, dtype=torch.uint8)
        self.address = self._memory.data_ptr()
        self.num_slots = num_slots
        call(lambda: agent.register_memory([(self.address, self._memory.nbytes, 0, "")], "DRAM"))

    def buffer(self, slot: int) -> Buffer:
        """The memory of one slot."""
        at = slot * SLOT_NBYTES
        return Buffer(self._memory[at : at + ENVELOPE_NBYTES + MESSAGE_NBYTES])

    def slot_of(self, buffer: Buffer) -> int:
        """Which slot that is."""
        return (buffer.tensor.data_ptr() - self.address) // SLOT_NBYTES


def descriptors(agent: Agent, owner: str | None, address: int, num_slots: int) -> Handle:
    """Descriptors of a ring of `owner`, or of this agent: `GRANULES_PER_SLOT` for each slot."""
    regions = [(address + at * GRANULE_NBYTES, GRANULE_NBYTES, 0) for at in range(num_slots * GRANULES_PER_SLOT)]
    return call(lambda: agent.prep_xfer_dlist(owner or _LOCAL, regions, "DRAM"))


def granules(slot: int, nbytes: int) -> list[int]:
    """Indices of the descriptors that cover the envelope and `nbytes` of payload in a slot."""
    first = slot * GRANULES_PER_SLOT
    return list(range(first, first - (-(ENVELOPE_NBYTES + nbytes) // GRANULE_NBYTES)))
