"""On which machine a process had best start. Pure.

Ray takes this as a hint, and takes another machine that has room if this one has not; after the loss of a machine it
chooses alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Machine:
    """A living node of the Ray cluster."""

    node_id: str
    total: Mapping[str, float]
    """Resources that it has."""
    labels: Mapping[str, str]
    used: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Resources that our processes have been given there."""
    pools: Counter[str] = field(default_factory=Counter)
    """Our processes there, by pool."""


def choose_machine(
    machines: Sequence[Machine], pool: str, bundle: Mapping[str, float], labels: Mapping[str, str]
) -> Machine | None:
    """The one with the fewest processes of `pool`, then the fewest at all, of those that have room for `bundle`. So a
    pool is spread, and the loss of a machine takes as little of it as can be. None if there is none."""
    fitting = [
        machine
        for machine in machines
        if all(machine.labels.get(name) == value for name, value in labels.items())
        and all(machine.total.get(name, 0.0) - machine.used.get(name, 0.0) >= amount for name, amount in bundle.items())
    ]
    if not fitting:
        return None
    return min(fitting, key=lambda m: (m.pools[pool], m.pools.total(), m.node_id))


def place(machine: Machine, pool: str, bundle: Mapping[str, float]) -> None:
    """Note that a process of `pool` is there."""
    for name, amount in bundle.items():
        machine.used[name] += amount
    machine.pools[pool] += 1
