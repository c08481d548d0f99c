"""What the check of the hand-off protocol explores: who takes part, what may go wrong, and one state of it all.

leg       one `Handoff` object: a prefill worker's try to hand one attempt to one decode worker
machine   what a decode worker knows of one attempt; legs that ask it about the same attempt share it
link      from one prefill process to one decode process; its generations never overlap
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

NOT_BEGUN = -1
"""State number of a leg before its first event."""
GONE = -2
"""State number of a leg whose process has crashed."""
NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Who hands which attempt to whom, by number; attempts count from 1 as on the wire."""

    prefill: int
    decode: int
    attempt: int
    instead_of: int | None = None
    """The leg after whose certain failure the same worker tries this one. None: sent out by the router, which may
    begin a new attempt at any time after the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who takes part and what may happen, each at any moment.

    Always: messages are delivered in any order, any number of times or never, while their link lives; leases and timers
    run out, unless `timeouts` is off.
    """

    legs: tuple[Leg, ...]
    transports: tuple[bool, ...] = (False,)
    """Those of each link, best first: whether it is one-sided, that is, writes into the destination by itself.
    A link changes to the next at any moment."""
    in_place: bool = False
    """Threads of a two-sided transport put payloads into their places while the ticket is open, and report it later."""
    num_chunks: int = 1
    num_held_chunks: int = 0
    """What the decode worker has of them when an attempt after the first reserves."""
    credit_chunks: int | None = None
    """The window of a link. None: unlimited."""
    generations: int = 1
    """With more than one, links break and come back so often."""
    crashes: frozenset[str] = frozenset()
    """Which workers may die: "p0", "d1", …"""
    cancels: bool = False
    damage: bool = False
    timeouts: bool = True
    renewals: bool = False
    """Timers that only send again, or renew a lease, run out too."""
    computes: bool = False
    """The prompt is still being computed when the hand-off begins."""
    drains: bool = False
    """The decode workers begin to refuse what is new."""
    late_data: bool = False
    """Chunks are delivered even after their link has ended, which no transport should do."""
    lost_acks: bool = False
    """An acknowledgement may be lost for good, unless it is the latest."""
    closes_tickets: bool = True
    """Threads put nothing into places that are not, or not any more, reserved for it."""
    keeps_verified: bool = True
    """Threads do not write over what is in place and verified."""
    max_repeats: int = 3
    """How often a chunk may be refused, and how often posted again."""
    must_succeed: bool = False
    """Whatever can happen here is no reason to end a hand-off without a commit."""
    lasting_fence: bool = True
    """A fence also stops what is written after it."""
    commits: bool = True
    """Without, the first token is never drawn, and the goal is not that everybody lets go but that every chunk gets out
    without the help of a clock."""

    @property
    def one_sided(self) -> bool:
        """Whether one of the transports is."""
        return any(self.transports)

    @property
    def machines(self) -> tuple[tuple[int, int], ...]:
        """(decode worker, attempt) of each machine, older attempts first."""
        return tuple(sorted({(leg.decode, leg.attempt) for leg in self.legs}, key=lambda machine: machine[::-1]))

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """(prefill worker, decode worker) of each link."""
        return tuple(sorted({(leg.prefill, leg.decode) for leg in self.legs}))


class Link(NamedTuple):
    """Both ends of a link. Generations count from 1; 0 is none."""

    generation: int = 0
    """The latest that the prefill worker has opened."""
    transport: int = 0
    """The one in use."""
    up: bool = False
    """Whether the prefill worker has it open still."""
    heard: int = 0
    """The one that the decode worker has open."""
    fenced: int = 0
    """Mask of the generations of which the decode worker takes no bytes any more."""
    given_up: bool = False
    """The decode worker counts as lost."""
    severed: bool = False
    """The decode process it led to is gone."""


class Flight(NamedTuple):
    """The transport still reads the source of a chunk or, one-sided, may still write its destination."""

    leg: int
    generation: int
    """Of the link; 0: a fence keeps it from landing."""
    nonce: int
    seq: int
    one_sided: bool


class World(NamedTuple):
    """One state of everything, in small numbers so that millions compare fast. States of the tables and messages are
    numbers that the model gives them. Tuples go by leg (`p`), machine (`d`, `commits`), link (`links`), or decode
    worker (the others). Each decode worker has room for one hand-off."""

    p: tuple[int, ...]
    d: tuple[int, ...]
    links: tuple[Link, ...]
    owner: tuple[int, ...]
    """Machine whose reservation has the blocks."""
    content: tuple[tuple[int, ...], ...]
    """Ticket under which the bytes of each chunk's place were written; 0: none of this request."""
    num_grants: tuple[int, ...]
    commits: tuple[int, ...]
    """Ticket under which each machine has ever committed; 0: none. Not even a crash undoes that."""
    net: int = 0
    """Mask of the messages that have been sent."""
    flying: frozenset[Flight] = frozenset()
    draining: bool = False
    dead: frozenset[str] = frozenset()
    """Who has crashed. A decode worker is started again at once, a prefill worker is not."""
