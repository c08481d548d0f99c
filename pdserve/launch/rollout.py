"""Brings processes of a running cluster to other settings, one at a time, and back if that does not go well."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Protocol

from pdserve.config import Config
from pdserve.config.change import fixed_changes
from pdserve.config.deployment import worker_pools
from pdserve.errors import ConfigError
from pdserve.launch.plan import ProcessPlan

LOOK_S = 0.25
"""How often to ask whether the process in question is ready."""


def require_possible(old: Config, new: Config) -> None:
    """Raises ConfigError for a change that running processes cannot take."""
    changed = fixed_changes(old, new)
    # Where it listens is reserved until the end.
    names = ("listen", "http_port", "router_id")
    changed += [f"router.{name}" for name in names if getattr(old.router, name) != getattr(new.router, name)]
    if old.local.demo_controls != new.local.demo_controls:
        changed.append("local.demo_controls")
    before, after = (_sizes(config) for config in (old, new))
    if before != after:
        changed.append(f"the workers ({before} to {after})")
    if changed:
        raise ConfigError(f"{', '.join(changed)}: cannot change while the cluster runs; stop it and start it again")


def _sizes(config: Config) -> str:
    return ", ".join(f"{pool.name}={pool.replicas}" for pool in worker_pools(config))


class Replaceable(Protocol):
    """The cluster, as far as it is needed here."""

    def replace(self, name: str, plan: ProcessPlan) -> None:
        """Begin to drain the process; what is started in its place has `plan`. Returns at once."""

    def replaced(self, name: str) -> bool:
        """Whether the new process is there and ready."""


class Rollout:
    """Not begun until the first `advance`. Pure but for the cluster: the caller passes the time."""

    def __init__(
        self,
        plans: Mapping[str, tuple[ProcessPlan, ProcessPlan]],
        cluster: Replaceable,
        *,
        timeout_s: float,
        progress: Callable[[str], None],
    ) -> None:
        """`plans` are the old and the new one by the name of the process, in order. Each process has `timeout_s` from
        the end of the old one's drain, which is at most its own drain time, to be ready."""
        self._plans = plans
        self._left = collections.deque(plans)
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._progress = progress
        self._current: str | None = None
        self._deadline = 0.0
        self._next_look = 0.0

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self._current is None and not self._left

    def advance(self, now: float) -> None:
        """Do what can be done now."""
        if self._current is None:
            if not self._left:
                return
            name = self._current = self._left.popleft()
            before, after = self._plans[name]
            self._deadline = now + before.drain_timeout_s + self._timeout_s
            self._progress(f"{name}: draining, its configuration has changed")
            self._cluster.replace(name, after)
        elif now >= self._next_look:
            self._next_look = now + LOOK_S
            if self._cluster.replaced(self._current):
                self._progress(f"{self._current}: ready with its new configuration")
                self._current = None
                if not self._left:
                    self._progress("every process has the new configuration")
            elif now > self._deadline:
                self._go_back(f"{self._current} is not ready after {self._timeout_s:g} s (local.start_timeout_s)")

    def failed(self, name: str, problem: str) -> bool:
        """A process has ended by itself. Whether that was because of its new settings: then it gets its old ones."""
        if name != self._current:
            return False
        self._go_back(problem)
        return True

    def _go_back(self, problem: str) -> None:
        name = self._current
        assert name is not None, "nothing is being replaced"
        untouched = f", and {', '.join(self._left)} keep theirs" if self._left else ""
        self._progress(f"{problem}\n{name} gets its old settings back{untouched}; correct the file and apply it again")
        self._current = None
        self._left.clear()
        self._cluster.replace(name, self._plans[name][0])
