"""What to do so that what runs becomes what is wanted. Pure: knows neither Ray nor time.

A plan is a list of waves. What is in one wave may happen at the same time; a wave begins when everything of the last
one is done: what was created is ready, what was removed has drained. In every moment of it at most one process of a
pool is missing, unless more were missing before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from pdserve.config.deployment import REDIS_POOL
from pdserve.ray.spec import indexed


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPool:
    """Processes that there should be."""

    name: str
    role: str
    replicas: int
    digest: str
    """Of their specification."""
    surge: bool = False
    """Whether to create the new process before the old one is removed, when it has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Existing:
    """A process that there is."""

    name: str
    pool: str
    role: str
    digest: str
    intact: bool = True
    """Whether nothing of it is missing. What an interrupted launch left half done is not."""


@dataclass(frozen=True, slots=True)
class Create:
    """Start a process and wait until it is ready."""

    name: str
    pool: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Let a process finish what it has, and take it away."""

    name: str
    reason: str


Action = Create | Remove
Wave = list[Action]

_REMOVAL_ORDER = ("router", "prefill", "decode", REDIS_POOL)
"""Whoever gives work to others goes first."""


def plan(wanted: Sequence[WantedPool], existing: Sequence[Existing]) -> list[Wave]:
    """Waves in order; none if everything is as it should be."""
    waves: list[Wave] = []
    broken = [process for process in existing if not process.intact]
    if broken:
        waves.append([Remove(process.name, "it is not complete") for process in broken])
    intact = [process for process in existing if process.intact]
    taken = {process.name for process in intact}
    additions: Wave = []
    replacements: list[Wave] = []
    surplus: list[tuple[str, Remove]] = []
    for pool in wanted:
        mine = sorted((p for p in intact if p.pool == pool.name), key=_by_index)
        right = [p for p in mine if p.digest == pool.digest]
        wrong = [p for p in mine if p.digest != pool.digest]
        # The highest numbers go, and changed ones before those that are as they should be.
        excess = max(0, len(mine) - pool.replicas)
        leaving = [*reversed(wrong), *reversed(right)][:excess]
        surplus += [(p.role, Remove(p.name, f"{pool.name} is to have {pool.replicas}")) for p in leaving]
        for _ in range(pool.replicas - len(mine)):
            name = indexed(pool.name, taken)
            taken.add(name)
            additions.append(Create(name, pool.name))
        for process in wrong:
            if process in leaving:
                continue
            remove = Remove(process.name, "its configuration has changed")
            if pool.surge:
                name = indexed(pool.name, taken)
                taken.add(name)
                replacements += [[Create(name, pool.name)], [remove]]
            else:
                replacements += [[remove], [Create(process.name, pool.name)]]
    names = {pool.name for pool in wanted}
    surplus += [(p.role, Remove(p.name, "its pool is gone")) for p in intact if p.pool not in names]
    redis: Wave = [action for action in additions if isinstance(action, Create) and action.pool == REDIS_POOL]
    rest: Wave = [action for action in additions if action not in redis]
    waves += [wave for wave in (redis, rest) if wave]
    waves += replacements
    return waves + removal_waves(surplus)


def removal_waves(leaving: Sequence[tuple[str, Remove]]) -> list[Wave]:
    """Removals, each with the role of its process, in the order in which roles end."""
    waves: list[Wave] = [[action for role, action in leaving if role == last] for last in _REMOVAL_ORDER]
    return [wave for wave in waves if wave]


def wanted_pools(
    replicas: Mapping[str, tuple[str, int]],
    digests: Mapping[str, str],
    surge: bool | Literal["auto"],
    *,
    never: Set[str] = frozenset(),
) -> list[WantedPool]:
    """`replicas` is role and number by pool, `digests` the specification of each, `never` the pools that
    have no surge whatever `surge` says."""
    return [
        WantedPool(
            name=name,
            role=role,
            replicas=count,
            digest=digests[name],
            surge=name not in never and (count == 1 if surge == "auto" else surge),
        )
        for name, (role, count) in replicas.items()
    ]


def describe(waves: Sequence[Wave]) -> list[str]:
    """For people, a line for each action."""
    lines = []
    for wave in waves:
        for action in wave:
            if isinstance(action, Create):
                lines.append(f"create {action.name}")
            else:
                lines.append(f"drain and remove {action.name}: {action.reason}")
    return lines


def _by_index(process: Existing) -> tuple[int, str]:
    index = process.name.rsplit("-", 1)[-1]
    return (int(index) if index.isdigit() else 0, process.name)
