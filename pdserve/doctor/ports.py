"""Whether a process could listen where the configuration says."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from pdserve.addresses import free_port
from pdserve.config import Config
from pdserve.doctor.findings import Finding, ok, problem
from pdserve.errors import ConfigError
from pdserve.types import Role


def check_ports(config: Config, roles: frozenset[str]) -> list[Finding]:
    """Of the processes of these roles (router, prefill, decode), as if they were to start here now."""
    findings = []
    for field, listen in _listens(config, roles):
        try:
            free_port(listen, field)
        except ConfigError as error:
            cause = error.__cause__
            taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
            findings.append(
                problem(
                    "ports",
                    error.message,
                    f"end the process that listens there (`ss -ltnp`), or change {field}"
                    if taken
                    else f"change {field} to an address of this machine and a port that this user may take",
                )
            )
    return findings or [ok("ports", "all are free")]


def _listens(config: Config, roles: frozenset[str]) -> Iterator[tuple[str, str]]:
    if "router" in roles:
        yield "router.listen", config.router.listen
        if config.router.http_listen is not None:
            yield "router.http_port", config.router.http_listen
    for role, section in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        if role.value in roles:
            yield f"{role}.listen", section.listen
            if section.metrics_listen is not None:
                yield f"{role}.metrics_listen", section.metrics_listen
            if config.transfer.tcp_port and "tcp" in config.transports:
                yield "transfer.tcp_port", f"{section.listen.rsplit(':', 1)[0]}:{config.transfer.tcp_port}"
