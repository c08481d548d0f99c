"""Which processes a local cluster consists of, and the configuration of each. Pure: starts nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from dataclasses import dataclass

from pdserve.config import Config
from pdserve.config.deployment import Pool, process_config, worker_pools
from pdserve.config.schema import CoreLedgerSection, Pinning
from pdserve.cpus import allowed_cores, available_cpus, share_cpus
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

    @property
    def metrics_listen(self) -> str | None:
        """host:port where a worker answers GET /metrics; None for a router, which does so on its HTTP port."""
        sections = {str(Role.PREFILL): self.config.prefill, str(Role.DECODE): self.config.decode}
        return sections[self.command].metrics_listen if self.command in sections else None

    @property
    def drain_timeout_s(self) -> float:
        """How long it lets its requests finish."""
        config = self.config
        timeouts = {
            "router": config.router.drain_timeout_s,
            str(Role.PREFILL): config.prefill.drain_timeout_s,
            str(Role.DECODE): config.decode.drain_timeout_s,
        }
        return timeouts[self.command]


def plan_processes(
    config: Config,
    *,
    store_url: str,
    router_address: str,
    http_port: int | None,
    log_format: str,
    metrics_listen: Sequence[str] = (),
    demo_socket: str | None = None,
    core_ledger: str | None = None,
) -> list[ProcessPlan]:
    """The router first, then prefill workers, then decode workers. `http_port` is the router's, `metrics_listen` an
    address for each worker, which takes it unless its configuration names one; none if empty.

    Threads are shared out among the workers unless `engine.threads` is set, and CPUs as `engine.pin_threads` says.
    `core_ledger` is the file through which workers lend each other their cores, see `lends_cores`.
    Of routers there is one, whatever the deployment says. Raises ConfigError for settings that only one worker can have
    when several are wanted.
    """
    pools = worker_pools(config)
    num_workers = sum(pool.replicas for pool in pools)
    share = max(1, available_cpus() // max(1, num_workers))

    def shared(base: Config) -> Config:
        return base.model_copy(
            update={
                "store": base.store.model_copy(update={"url": store_url}),
                "engine": base.engine.model_copy(update={"threads": base.engine.threads or share}),
                "log": base.log.model_copy(update={"format": log_format}),
            }
        )

    routers = shared(process_config(config))
    router_name = routers.router.router_id or "router-0"
    router = routers.router.model_copy(
        update={"listen": router_address, "http_port": http_port, "router_id": router_name, "demo_socket": demo_socket}
    )
    plans = [ProcessPlan(name=router_name, command="router", config=routers.model_copy(update={"router": router}))]
    for pool in pools:
        metrics = metrics_listen[len(plans) - 1 :][: pool.replicas]
        plans += _workers(shared(pool.config), pool, metrics)
    threads = {plan.config.engine.threads or share for plan in plans[1:]}
    names = [plan.name for plan in plans]
    # Workers come after the router.
    for index, cpus in enumerate(_pinning(config.engine.pin_threads, num_workers, threads), start=1):
        own = plans[index].config
        update: dict[str, object] = {"pin_threads": cpus}
        if core_ledger is not None:
            update["core_ledger"] = CoreLedgerSection(file=core_ledger, slot=index - 1)
        engine = own.engine.model_copy(update=update)
        plans[index] = dataclasses.replace(plans[index], config=own.model_copy(update={"engine": engine}))
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"worker_id: {min(repeated)!r} names more than one process; every name must be different")
    return plans


def lends_cores(config: Config) -> bool:
    """Whether workers are to use each other's cores while these are idle: if there are several, with a share each that
    nobody has set, and more cores than one of them has."""
    engine, num_workers = config.engine, sum(pool.replicas for pool in worker_pools(config))
    shared_out = all(pool.config.engine.threads is None for pool in worker_pools(config))
    return (
        engine.lend_cores
        and engine.kind != "torch"
        and shared_out
        and engine.pin_threads in ("auto", False)
        and available_cpus() > max(1, available_cpus() // max(1, num_workers))
    )


def _pinning(wanted: Pinning, num_workers: int, several: Set[int]) -> Sequence[Pinning]:
    """`engine.pin_threads` of each worker. Raises ConfigError if there are not enough CPUs for what is wanted."""
    if len(several) > 1:
        if wanted is True:
            raise ConfigError("engine.pin_threads: true needs the same engine.threads in every pool; use auto or false")
        return [False] * num_workers
    threads = max(several, default=1)
    cores = allowed_cores()
    num_cpus = sum(map(len, cores))
    if wanted == "auto":
        # A single thread waits for no other and is best left to the system. A quota means that the cores are shared
        # with other containers, of which each would take the same ones.
        wanted = threads > 1 and num_workers * threads <= num_cpus == available_cpus()
    if wanted is False:
        return [False] * num_workers
    if wanted is not True:
        raise ConfigError(
            f"engine.pin_threads: {num_workers} workers cannot share the CPUs {list(wanted)}; use auto or true"
        )
    shares = share_cpus(cores, num_workers, threads)
    if shares is None:
        raise ConfigError(
            f"engine.pin_threads: {num_workers} workers of {threads} threads need more than the {num_cpus} CPUs there "
            "are; use auto or false, or fewer engine.threads"
        )
    return shares


def _workers(config: Config, pool: Pool, metrics_listen: Sequence[str]) -> list[ProcessPlan]:
    role = Role(pool.role)
    section = config.prefill if role is Role.PREFILL else config.decode
    count = pool.replicas
    if count > 1:
        if section.metrics_listen is not None and not section.metrics_listen.endswith(":0"):
            raise ConfigError(
                f"{role}.metrics_listen: {section.metrics_listen} cannot be the address of {count} workers; leave it "
                f"out, or use port 0 or local.{role}_workers: 1"
            )
        if not section.listen.endswith(":0"):
            raise ConfigError(
                f"{role}.listen: {section.listen} cannot be the address of {count} workers; "
                f"use port 0, or local.{role}_workers: 1"
            )
        if section.advertise is not None:
            raise ConfigError(f"{role}.advertise: {count} workers cannot share one address; leave it out")
    plans = []
    for index in range(count):
        alone = section.worker_id == pool.name and count == 1
        name = pool.name if alone else f"{pool.name}-{index}"
        update: dict[str, object] = {"worker_id": name}
        if section.metrics_listen is None and metrics_listen:
            update["metrics_listen"] = metrics_listen[index]
        own = section.model_copy(update=update)
        plans.append(ProcessPlan(name=name, command=str(role), config=config.model_copy(update={str(role): own})))
    return plans
