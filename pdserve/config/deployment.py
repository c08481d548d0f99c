"""How many processes of each kind a deployment has, and what each of them needs: what launchers read of the YAML.

A single process ignores it. Without it there are one router and the workers that `local` asks for, so that every
configuration of one machine is also one of a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from pdserve.config.schema import (
    Config,
    DecodeSection,
    EngineSection,
    HealthSection,
    KvSection,
    LogSection,
    PrefillSection,
    Section,
    TransferSection,
)

ROUTER_POOL = "router"
"""Name of the routers among the pools."""
REDIS_POOL = "redis"
"""Name of the embedded redis server among the pools."""

PoolName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
Label = Annotated[str, Field(min_length=1, max_length=253)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ResourcesSection(Section):
    """What one process is given on its machine. `pdserve up` shares out the machine instead and ignores this."""

    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] = 1.0
    """CPU cores. A worker computes with as many threads unless `engine.threads` is set."""
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs. A process that asks for none sees none."""
    custom: dict[str, Amount] = Field(default={})
    """Further resources by Ray's name for them, say an accelerator type or an RDMA device."""
    labels: dict[Label, Label] = Field(default={})
    """Labels that the machine must have (`ray start --labels`): to keep prefill and decode workers on different
    machines, or both near a switch."""


class PoolSettings(Section):
    """What differs for the workers of one pool; the rest is as in the sections of the same name outside."""

    engine: EngineSection = EngineSection()
    kv: KvSection = KvSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    transfer: TransferSection = TransferSection()
    health: HealthSection = HealthSection()
    log: LogSection = LogSection()


class PoolSection(Section):
    """Workers that are alike. They are named <pool>-0, <pool>-1 and so on, which is their `worker_id`."""

    role: Literal["prefill", "decode"]
    """What they do."""
    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """How many there are. `pdserve scale` changes it until the file is launched again."""
    resources: ResourcesSection = ResourcesSection()
    settings: PoolSettings = PoolSettings()


class RoutersSection(Section):
    """The routers; `router` has their settings. `pdserve up` starts one, whatever stands here."""

    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """How many there are. Several on one machine need `router.listen` and `router.http_port` with port 0."""
    resources: ResourcesSection = ResourcesSection()


class RedisSection(Section):
    """The redis server that `pdserve launch` starts on Ray's head node where `store.url` is `embedded`. It keeps
    nothing on disk: for production name one that does."""

    port: Annotated[int, Field(ge=1, le=65535)] = 6380
    """Where it listens. A fixed one, so that it is found again after a restart; not Ray's own 6379."""


class UpdateSection(Section):
    """How processes whose configuration has changed are replaced."""

    surge: Literal["auto"] | bool = "auto"
    """Whether the new process starts before the old one is drained, which needs room for one more. `auto` does so only
    in pools of one, where requests would wait meanwhile. Else one process is drained first and its room is used."""


class DeploymentSection(Section):
    """The processes of a deployment."""

    routers: RoutersSection = RoutersSection()
    pools: dict[PoolName, PoolSection] = Field(default={})
    """Workers by the name of their pool. Default: pools `prefill` and `decode` of the sizes that `local` says."""
    redis: RedisSection = RedisSection()
    update: UpdateSection = UpdateSection()

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        for name, pool in self.pools.items():
            if name in (ROUTER_POOL, REDIS_POOL):
                raise ValueError(f"pools.{name}: the name is taken, call it something else")
            other = "decode" if pool.role == "prefill" else "prefill"
            if other in pool.settings.model_fields_set:
                raise ValueError(f"pools.{name}.settings.{other}: the pool has the role {pool.role}")
        if self.pools and not any(pool.role == "decode" for pool in self.pools.values()):
            raise ValueError("pools: at least one needs the role decode")
        return self


class Deployment(Config):
    """A whole deployment: what every process reads, and which processes there are."""

    deployment: DeploymentSection = DeploymentSection()

    @model_validator(mode="after")
    def _pools_are_complete(self) -> Self:
        pools = worker_pools(self)
        alone = not any(pool.role == "prefill" and pool.replicas for pool in pools)
        for pool in pools if alone and self.deployment.pools else ():
            if pool.config.decode.local_prefill_tokens_per_step == 0:
                raise ValueError(
                    f"deployment.pools: without prefill workers nobody computes prompts, since {pool.name} has "
                    "decode.local_prefill_tokens_per_step: 0"
                )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Processes that are alike, with the configuration that each of them gets but for its name and addresses."""

    name: str
    role: Literal["router", "prefill", "decode"]
    replicas: int
    resources: ResourcesSection
    config: Config


def worker_pools(config: Config) -> list[Pool]:
    """Prefill pools, then decode pools. Raises ValueError for settings of a pool that do not go with the rest."""
    if not isinstance(config, Deployment) or not config.deployment.pools:
        base = process_config(config)
        local, plain = config.local, ResourcesSection()
        prefill = config.prefill.worker_id or "prefill"
        decode = config.decode.worker_id or "decode"
        return [
            Pool(name=prefill, role="prefill", replicas=local.prefill_workers, resources=plain, config=base),
            Pool(name=decode, role="decode", replicas=local.decode_workers, resources=plain, config=base),
        ]
    pools = [
        Pool(
            name=name,
            role=section.role,
            replicas=section.replicas,
            resources=section.resources,
            config=_merged(config, section.settings, f"deployment.pools.{name}.settings"),
        )
        for name, section in config.deployment.pools.items()
    ]
    return sorted(pools, key=lambda pool: pool.role != "prefill")


def router_pool(config: Config) -> Pool:
    """The routers."""
    section = config.deployment.routers if isinstance(config, Deployment) else RoutersSection()
    return Pool(
        name=ROUTER_POOL,
        role="router",
        replicas=section.replicas,
        resources=section.resources,
        config=process_config(config),
    )


def process_config(config: Config) -> Config:
    """What a single process gets: everything but the other processes."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    tree.pop("deployment", None)
    return Config.model_validate(tree)


def with_replicas(config: Deployment, replicas: Mapping[str, int]) -> Deployment:
    """The deployment with other numbers of processes. Raises KeyError with the name of a pool that does not exist, and
    ValueError for a number that cannot be."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    section = tree.setdefault("deployment", {})
    if not config.deployment.pools:
        section["pools"] = {
            pool.name: {"role": pool.role, "replicas": pool.replicas, "resources": {}} for pool in worker_pools(config)
        }
    for name, count in replicas.items():
        if name == ROUTER_POOL:
            section.setdefault("routers", {})["replicas"] = count
        elif name in section["pools"]:
            section["pools"][name]["replicas"] = count
        else:
            raise KeyError(name)
    return Deployment.model_validate(tree)


def _merged(config: Config, settings: Section, path: str) -> Config:
    tree = config.model_dump(mode="json", exclude_unset=True)
    tree.pop("deployment", None)
    _merge(tree, settings.model_dump(mode="json", exclude_unset=True))
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"{path}: {where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from error


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Put `over` on top of `base`, key by key."""
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
