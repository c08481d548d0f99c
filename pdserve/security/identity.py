"""Who a process is by its certificate.

A certificate carries the URI `pdserve://<cluster>/<role>/<name>`, which the side that is called checks, and the DNS
names `<role>.<cluster>.pdserve` and, for workers, `worker.<cluster>.pdserve`, which the side that calls checks: TLS
libraries compare DNS names with what they expect by themselves. These names are in no DNS. Hosts do not count, so a
certificate stays valid wherever its process runs.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pdserve.types import Role

_URI: Final = re.compile(r"pdserve://([A-Za-z0-9._-]{1,64})/([a-z]+)/([A-Za-z0-9._-]{1,64})")


class PeerRole(enum.StrEnum):
    """What a process may be."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    OPERATOR = "operator"
    """People and tools: they may look (statistics, metrics) and drain, and get no work done."""

    @classmethod
    def of(cls, role: Role) -> PeerRole:
        """Of a worker."""
        return cls(role.value)


ANY_WORKER: Final = "worker"
"""Stands for prefill and decode workers where the caller does not mind."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a certificate says."""

    cluster: str
    role: PeerRole
    name: str

    @property
    def uri(self) -> str:
        """As it stands in the certificate."""
        return f"pdserve://{self.cluster}/{self.role}/{self.name}"

    @property
    def dns_names(self) -> tuple[str, ...]:
        """What whoever connects to this process looks for."""
        kinds = [str(self.role)] + ([ANY_WORKER] if self.role in (PeerRole.PREFILL, PeerRole.DECODE) else [])
        return tuple(server_name(self.cluster, kind) for kind in kinds)


def server_name(cluster: str, kind: str) -> str:
    """The DNS name in the certificates of a role, or of ANY_WORKER."""
    return f"{kind}.{cluster}.pdserve"


def find_identity(names: Iterable[str]) -> Identity | None:
    """The identity among the alternative names of a certificate. None if there is none, or more than one."""
    found = [match for name in names if (match := _URI.fullmatch(name)) and match[2] in list(PeerRole)]
    if len(found) != 1:
        return None
    cluster, role, name = found[0].groups()
    return Identity(cluster, PeerRole(role), name)
