"""Makes a deployment on Ray what its configuration says: compares, plans, acts, waits. Knows Ray only as a Fleet."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from pdserve.config.change import fixed_changes
from pdserve.config.deployment import REDIS_POOL, ROUTER_POOL, Deployment, worker_pools
from pdserve.errors import ConfigError, NotFoundError
from pdserve.launch.process import StartError
from pdserve.ray.plan import Create, Existing, Remove, WantedPool, Wave, plan, removal_waves, wanted_pools
from pdserve.ray.spec import ProcessSpec, changed_settings, specs_of
from pdserve.ray.supervisor import STOP_MARGIN_S, Phase

POLL_S = 0.25
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What every process is told beside its own specification."""

    store_url: str
    password: str
    start_s: float


class Fleet(Protocol):
    """What the launcher needs of Ray; `pdserve.ray.fleet.RayFleet` says what each does."""

    def lock(self) -> None: ...
    def head_host(self) -> str: ...
    def load(self) -> dict[str, Any] | None: ...
    def save(self, record: dict[str, Any] | None) -> None: ...
    def existing(self) -> list[Existing]: ...
    def specs(self, names: Sequence[str]) -> dict[str, ProcessSpec]: ...
    def reports(self, names: Sequence[str]) -> dict[str, dict[str, Any]]: ...
    def create(self, name: str, spec: ProcessSpec, options: Options) -> None: ...
    def drain(self, name: str, timeout_s: float | None) -> bool: ...
    def destroy(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process of a deployment."""

    name: str
    pool: str
    role: str
    phase: str
    current: bool
    """Whether it is as the deployment says."""
    host: str
    node_id: str
    """Of Ray; empty while it is nowhere, as is the host."""
    pid: int | None
    starts: int
    addresses: Mapping[str, str]
    last_error: str


class Launcher:
    """Acts on one deployment through one Fleet."""

    def __init__(self, fleet: Fleet, progress: Progress) -> None:
        self._fleet = fleet
        self._progress = progress
        self._ready: set[str] = set()
        """What has been seen to be ready, and not been removed since."""

    def plan(self, deployment: Deployment) -> list[Wave]:
        """What `launch` would do. Raises ConfigError for a change that a running deployment cannot take."""
        record = self._fleet.load()
        existing = self._fleet.existing()
        if record is not None and existing:
            _check_fixed(Deployment.model_validate(record["deployment"]), deployment)
        return plan(_wanted(deployment), existing)

    def reasons(self, deployment: Deployment, waves: Sequence[Wave]) -> dict[str, str]:
        """What has changed of each process that is replaced, by its name."""
        specs = specs_of(deployment)
        leaving = [action.name for wave in waves for action in wave if isinstance(action, Remove)]
        found = {}
        for name, spec in self._fleet.specs(leaving).items():
            if spec.pool in specs and (changed := changed_settings(spec, specs[spec.pool])):
                found[name] = ", ".join(changed)
        return found

    def launch(self, deployment: Deployment) -> int:
        """Make it so, wave by wave, and wait until every process is ready. Returns how many actions that took.

        Raises StartError if a process does not become ready within `local.start_timeout_s`; what was done stays, and
        another launch goes on from there.
        """
        self._fleet.lock()
        waves = self.plan(deployment)
        record = self._fleet.load()
        password = secrets.token_urlsafe(24) if record is None else record["password"]
        tree = deployment.model_dump(mode="json", exclude_unset=True)
        self._fleet.save({"deployment": tree, "password": password})
        start_s = deployment.local.start_timeout_s
        options = Options(store_url=self._store_url(deployment, password), password=password, start_s=start_s)
        specs = specs_of(deployment)
        for wave in waves:
            self._remove([action for action in wave if isinstance(action, Remove)], None)
            created = [action for action in wave if isinstance(action, Create)]
            # What needs most of a machine chooses first, or small ones spread so that none has room for it.
            for action in sorted(created, key=lambda action: specs[action.pool].size, reverse=True):
                self._progress(f"{action.name}: starting")
                self._fleet.create(action.name, specs[action.pool], options)
            self._wait_ready([action.name for action in created], start_s)
        self._wait_ready([process.name for process in self._fleet.existing()], start_s)
        return sum(map(len, waves))

    def deployed(self) -> Deployment:
        """What was launched last, with later changes of scale. Raises NotFoundError."""
        record = self._fleet.load()
        if record is None:
            raise NotFoundError("nothing is launched under this name of a cluster on this Ray cluster")
        return Deployment.model_validate(record["deployment"])

    def status(self) -> list[ProcessStatus]:
        """Every process that there is or should be. Raises NotFoundError if nothing was launched."""
        deployment = self.deployed()
        digests = {name: spec.digest for name, spec in specs_of(deployment).items()}
        existing = self._fleet.existing()
        reports = self._fleet.reports([process.name for process in existing])
        found = []
        for process in existing:
            report = reports[process.name]
            found.append(
                ProcessStatus(
                    name=process.name,
                    pool=process.pool,
                    role=process.role,
                    phase=report["phase"],
                    current=digests.get(process.pool) == process.digest,
                    host=report.get("host", ""),
                    node_id=report.get("node_id", ""),
                    pid=report.get("pid"),
                    starts=report.get("starts", 0),
                    addresses=report.get("addresses", {}),
                    last_error=report["last_error"],
                )
            )
        known = {process.name for process in existing}
        found += [
            _missing(action, specs_of(deployment)[action.pool].role)
            for wave in plan(_wanted(deployment), existing)
            for action in wave
            if isinstance(action, Create) and action.name not in known
        ]
        order = [REDIS_POOL, ROUTER_POOL, *(pool.name for pool in worker_pools(deployment))]
        return sorted(found, key=lambda s: (order.index(s.pool) if s.pool in order else len(order), s.name))

    def down(self, *, drain_timeout_s: float | None = None) -> list[str]:
        """Drain everything, routers first, and leave nothing. Returns names of processes that had to be killed.

        `drain_timeout_s` in the place of what the processes' own configuration says."""
        self._fleet.lock()
        existing = self._fleet.existing()
        leaving = [(process.role, Remove(process.name, "down")) for process in existing]
        killed: list[str] = []
        for wave in removal_waves(leaving):
            killed += self._remove([a for a in wave if isinstance(a, Remove)], drain_timeout_s)
        self._fleet.save(None)
        return killed

    def _store_url(self, deployment: Deployment, password: str) -> str:
        if deployment.store.url != "embedded":
            return deployment.store.url
        return f"redis://:{quote(password)}@{self._fleet.head_host()}:{deployment.deployment.redis.port}/0"

    def _wait_ready(self, names: Sequence[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        waiting = set(names) - self._ready
        while waiting:
            reports = self._fleet.reports(sorted(waiting))
            for name in sorted(waiting):
                if reports[name]["phase"] == Phase.READY:
                    waiting.discard(name)
                    self._ready.add(name)
                    self._progress(f"{name}: ready on {reports[name]['host']}")
            if not waiting:
                return
            if time.monotonic() > deadline:
                problems = "".join(
                    f"\n  {name}: {reports[name]['phase']}"
                    + (f": {reports[name]['last_error']}" if reports[name]["last_error"] else "")
                    for name in sorted(waiting)
                )
                raise StartError(
                    f"not ready after {timeout_s:g} s (local.start_timeout_s); they go on trying, and another "
                    f"`pdserve launch` goes on from here:{problems}"
                )
            time.sleep(POLL_S)

    def _remove(self, leaving: Sequence[Remove], drain_timeout_s: float | None) -> list[str]:
        """Drain all at the same time, wait, take them away. Names of those that had to be killed."""
        if not leaving:
            return []
        names = [action.name for action in leaving]
        specs = self._fleet.specs(names)
        waiting: dict[str, float] = {}
        for action in leaving:
            self._progress(f"{action.name}: draining ({action.reason})")
            limit_s = drain_timeout_s
            if limit_s is None:
                limit_s = specs[action.name].drain_timeout_s if action.name in specs else 0.0
            if self._fleet.drain(action.name, drain_timeout_s):
                waiting[action.name] = time.monotonic() + limit_s + 3 * STOP_MARGIN_S
        killed = []
        while waiting:
            reports = self._fleet.reports(sorted(waiting))
            for name, deadline in sorted(waiting.items()):
                report = reports[name]
                if report["phase"] == Phase.STOPPED or time.monotonic() > deadline:
                    if report.get("killed") or report["phase"] != Phase.STOPPED:
                        killed.append(name)
                    del waiting[name]
            if waiting:
                time.sleep(POLL_S)
        for name in names:
            self._fleet.destroy(name)
            self._ready.discard(name)
            self._progress(f"{name}: removed" + (" (had to be killed)" if name in killed else ""))
        return killed


def _wanted(deployment: Deployment) -> list[WantedPool]:
    specs = specs_of(deployment)
    numbers = {pool.name: pool.replicas for pool in worker_pools(deployment)}
    numbers[ROUTER_POOL] = deployment.deployment.routers.replicas
    numbers[REDIS_POOL] = 1
    return wanted_pools(
        {name: (spec.role, numbers[name]) for name, spec in specs.items()},
        {name: spec.digest for name, spec in specs.items()},
        deployment.deployment.update.surge,
        # The new router could not listen where the old one still does, if both are on one machine.
        never={REDIS_POOL} if deployment.router.listen.endswith(":0") else {REDIS_POOL, ROUTER_POOL},
    )


def _check_fixed(old: Deployment, new: Deployment) -> None:
    changed = fixed_changes(old, new)
    if old.store.url == "embedded" and old.deployment.redis != new.deployment.redis:
        changed.append("deployment.redis")
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: cannot change while the deployment runs. `pdserve launch --down` first, or launch "
            "the new one beside it under another name (`cluster`)"
        )


def _missing(action: Create, role: str) -> ProcessStatus:
    return ProcessStatus(
        name=action.name,
        pool=action.pool,
        role=role,
        phase="missing",
        current=False,
        host="",
        node_id="",
        pid=None,
        starts=0,
        addresses={},
        last_error="launch again to start it",
    )
