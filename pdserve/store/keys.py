"""Names of the keys of one deployment, and the version of what they hold.

Everything lives under `pdserve:{cluster}:`. The braces are part of the name: on a redis cluster they are the hash
tag, so all keys of a deployment share a slot and a script may touch several of them (a worker and the index of workers,
a request and whatever hangs on it). The state is small and soft, a few writes per request, so one node carries a
deployment easily; several deployments spread over nodes by their names.

| key          | kind | TTL                     | what                                                         |
|--------------|------|-------------------------|--------------------------------------------------------------|
| `meta`       | hash | refreshed by each poll  | `schema`, and `generation`: new whenever redis lost its data |
| `workers`    | zset | longest lease           | worker id -> end of its lease, ms of the server's clock      |
| `worker:{id}`| hash | lease                   | `info`, `stats` (JSON), `incarnation`, `epoch`               |
| `req:{id}`   | hash | live TTL, then retention| one request, see requests.py                                 |
| `resume:{id}`| string | live TTL, then a minute | what another router needs to go on with it, see requests.py |
| `router:{id}`| string | lease                 | incarnation of a router, see router_lease.py                 |
| `blocks:{worker}:{incarnation}` | set    | lease | names of the blocks that the process holds            |
| `events:{worker}`               | stream | lease | the latest changes of that set, see prefix_events.py  |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pdserve.errors import ConfigError

SCHEMA_VERSION: Final = 1
"""Raised when an older process could misread what a newer one writes."""

META_TTL_MS: Final = 3_600_000
"""Longer than any pause between two polls of a live process."""

_CLUSTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Keyspace:
    """Key names of the deployment `cluster`. Raises ConfigError for a name that could break the hash tag."""

    cluster: str

    def __post_init__(self) -> None:
        if not _CLUSTER_NAME.fullmatch(self.cluster):
            raise ConfigError(f"cluster: must be 1 to 64 of A-Z a-z 0-9 . _ -, got {self.cluster!r}", field="cluster")

    @property
    def prefix(self) -> str:
        """What every key of the deployment starts with."""
        return f"pdserve:{{{self.cluster}}}:"

    @property
    def meta(self) -> str:
        """Schema version and generation."""
        return f"{self.prefix}meta"

    @property
    def workers(self) -> str:
        """Index of workers."""
        return f"{self.prefix}workers"

    def worker(self, worker_id: str) -> str:
        """One worker."""
        return f"{self.prefix}worker:{worker_id}"

    def request(self, request_id: str) -> str:
        """One request."""
        return f"{self.prefix}req:{request_id}"

    def resume(self, request_id: str) -> str:
        """What another router needs to go on with a request."""
        return f"{self.prefix}resume:{request_id}"

    def router(self, router_id: str) -> str:
        """Lease of one router."""
        return f"{self.prefix}router:{router_id}"

    def blocks(self, worker_id: str, incarnation: str) -> str:
        """Names of the blocks that one worker process holds."""
        return f"{self.prefix}blocks:{worker_id}:{incarnation}"

    def events(self, worker_id: str) -> str:
        """What has been stored and removed on a worker lately."""
        return f"{self.prefix}events:{worker_id}"
