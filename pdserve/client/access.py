"""How commands reach a router that asks for TLS or a key: by variables of the environment, so that no key stands in a
command line, which every user of the machine can read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from pdserve.client.endpoints import Tls

API_KEY: Final = "PDSERVE_API_KEY"
CA_FILE: Final = "PDSERVE_TLS_CA_FILE"
SERVER_NAME: Final = "PDSERVE_TLS_SERVER_NAME"
SYSTEM: Final = "system"
"""Value of CA_FILE: TLS with the public authorities."""


@dataclass(frozen=True, slots=True)
class Access:
    """Arguments of `Client`."""

    tls: Tls | None = None
    api_key: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """TLS if CA_FILE names a file, or SYSTEM. Empty variables count as unset."""
        ca_file = environ.get(CA_FILE) or None
        tls = None
        if ca_file is not None:
            server_name = environ.get(SERVER_NAME) or None
            tls = Tls(ca_file=None if ca_file == SYSTEM else ca_file, server_name=server_name)
        return cls(tls, environ.get(API_KEY) or None)
