"""What one process of a deployment on Ray is made of, in a form that can be sent and compared."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from pdserve import __version__
from pdserve.config import Config
from pdserve.config.change import changed_names, settings_read
from pdserve.config.deployment import REDIS_POOL, Deployment, Pool, router_pool, worker_pools

HEAD_RESOURCE = "node:__internal_head__"
"""A resource that Ray gives to its head node alone, in the amount of 1."""
SLIVER = 0.001
"""Of it for something that is to run there."""
DIGEST_LENGTH = 12
"""Hexadecimal digits: enough to tell the configurations of one deployment apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What all processes of a pool have in common."""

    pool: str
    role: str
    """`router`, `prefill` or `decode`, which are commands of `pdserve`; or `redis`."""
    config: dict[str, Any]
    """Settings, as JSON, without name, addresses and the URL of an embedded redis."""
    cpus: float
    gpus: int
    custom: dict[str, float]
    labels: dict[str, str]
    version: str = __version__
    """Of pdserve: another one replaces the processes."""

    @property
    def digest(self) -> str:
        """Differs between specs that need different processes."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:DIGEST_LENGTH]

    @property
    def bundle(self) -> dict[str, float]:
        """Resources as Ray wants them."""
        amounts = {"CPU": self.cpus, "GPU": float(self.gpus), **self.custom}
        return {name: amount for name, amount in amounts.items() if amount > 0}

    @property
    def size(self) -> tuple[float, ...]:
        """To compare how hard it is to find room for it."""
        return self.gpus, sum(self.custom.values()), self.cpus

    @property
    def drain_timeout_s(self) -> float:
        """How long the process lets requests finish."""
        return self.process_config().model_dump()[self.role]["drain_timeout_s"] if self.role != REDIS_POOL else 0.0

    def process_config(self) -> Config:
        """The settings, checked."""
        return Config.model_validate(self.config)

    def to_json(self) -> str:
        """The same text for the same spec."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


def specs_of(deployment: Deployment) -> dict[str, ProcessSpec]:
    """By pool: redis if it is an embedded one, prefill pools, decode pools, routers."""
    found = {}
    if deployment.store.url == "embedded":
        redis = {"port": deployment.deployment.redis.port}
        found[REDIS_POOL] = ProcessSpec(
            pool=REDIS_POOL, role=REDIS_POOL, config=redis, cpus=0, gpus=0, custom={HEAD_RESOURCE: SLIVER}, labels={}
        )
    for pool in (*worker_pools(deployment), router_pool(deployment)):
        found[pool.name] = _spec(pool)
    return found


def changed_settings(old: ProcessSpec, new: ProcessSpec) -> list[str]:
    """Names of what differs, dotted; without values, which may be secret."""
    names = changed_names(json.loads(old.to_json()), json.loads(new.to_json()))
    return [name.removeprefix("config.") for name in names]


def _spec(pool: Pool) -> ProcessSpec:
    resources = pool.resources
    engine = pool.config.engine
    if pool.role != "router" and engine.threads is None:
        engine = engine.model_copy(update={"threads": max(1, math.floor(resources.cpus))})
    return ProcessSpec(
        pool=pool.name,
        role=pool.role,
        config=settings_read(pool.config.model_copy(update={"engine": engine}), pool.role),
        cpus=resources.cpus,
        gpus=resources.gpus,
        custom=dict(resources.custom),
        labels=dict(resources.labels),
    )


def indexed(pool: str, taken: Iterable[str]) -> str:
    """The first free name of a pool."""
    names = set(taken)
    index = 0
    while f"{pool}-{index}" in names:
        index += 1
    return f"{pool}-{index}"
