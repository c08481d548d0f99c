"""Which processes a local cluster consists of, and the configuration of each. Pure: starts nothing."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config import Config
from pdserve.config.schema import WorkerSection
from pdserve.cpus import available_cpus
from pdserve.errors import ConfigError
from pdserve.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process to start."""

    name: str
    """Unique in the cluster: the worker id, or the router's."""
    command: str
    """Subcommand of `pdserve` that runs it."""
    config: Config


def plan_processes(config: Config, *, store_url: str, router_address: str, log_format: str) -> list[ProcessPlan]:
    """The router first, then prefill workers, then decode workers.

    Threads are shared out among the workers unless `engine.threads` is set. Raises ConfigError for settings that only
    one worker can have when several are wanted.
    """
    local = config.local
    threads = config.engine.threads or max(1, available_cpus() // (local.prefill_workers + local.decode_workers))
    shared = config.model_copy(
        update={
            "store": config.store.model_copy(update={"url": store_url}),
            "engine": config.engine.model_copy(update={"threads": threads}),
            "log": config.log.model_copy(update={"format": log_format}),
        }
    )
    router_name = config.router.router_id or "router-0"
    router = config.router.model_copy(update={"listen": router_address, "router_id": router_name})
    plans = [
        ProcessPlan(name=router_name, command="router", config=shared.model_copy(update={"router": router})),
        *_workers(shared, Role.PREFILL, config.prefill, local.prefill_workers),
        *_workers(shared, Role.DECODE, config.decode, local.decode_workers),
    ]
    names = [plan.name for plan in plans]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"worker_id: {min(repeated)!r} names more than one process; every name must be different")
    return plans


def _workers(config: Config, role: Role, section: WorkerSection, count: int) -> list[ProcessPlan]:
    if count > 1:
        if not section.listen.endswith(":0"):
            raise ConfigError(
                f"{role}.listen: {section.listen} cannot be the address of {count} workers; "
                f"use port 0, or local.{role}_workers: 1"
            )
        if section.advertise is not None:
            raise ConfigError(f"{role}.advertise: {count} workers cannot share one address; leave it out")
    plans = []
    for index in range(count):
        base = section.worker_id or str(role)
        name = section.worker_id if section.worker_id and count == 1 else f"{base}-{index}"
        own = section.model_copy(update={"worker_id": name})
        plans.append(ProcessPlan(name=name, command=str(role), config=config.model_copy(update={str(role): own})))
    return plans
