"""All checks, in the order in which one would look: the machine, what is on it, redis, and who is found there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pdserve.config import Config
from pdserve.doctor.certificates import check_certificates
from pdserve.doctor.findings import Finding, Verdict, problem
from pdserve.doctor.machine import check_gpus, check_memory, check_open_files, check_processor, check_ranks
from pdserve.doctor.peers import check_peers
from pdserve.doctor.ports import check_ports
from pdserve.doctor.ptrace import check_ptrace
from pdserve.doctor.store import check_store
from pdserve.errors import ConfigError
from pdserve.security.identity import PeerRole
from pdserve.security.internal import InternalTls

ROLES: Final = ("router", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found."""

    findings: tuple[Finding, ...]

    @property
    def num_problems(self) -> int:
        """Findings that have to be put right."""
        return sum(finding.verdict is Verdict.PROBLEM for finding in self.findings)

    @property
    def num_warnings(self) -> int:
        """Findings that can wait."""
        return sum(finding.verdict is Verdict.WARNING for finding in self.findings)


def examine(config: Config, roles: Iterable[str] = ROLES) -> Examination:
    """Look at this machine as one that is to run processes of `roles`. Changes nothing anywhere."""
    wanted = frozenset(roles)
    workers_here = bool(wanted - {"router"})
    findings = [check_open_files()]
    if workers_here:
        findings += [check_memory(config), check_processor(config), *check_gpus(config), *check_ranks(config)]
        findings += check_ptrace(config)
    findings += check_certificates(config, wanted)
    findings += check_ports(config, wanted)
    findings += asyncio.run(_ask_others(config, wanted))
    return Examination(tuple(findings))


async def _ask_others(config: Config, roles: frozenset[str]) -> list[Finding]:
    findings, workers = await check_store(config)
    tls, reason = _own_certificate(config, roles)
    if workers and reason:
        return [*findings, problem("peers", f"workers cannot be asked: {reason}", "put the certificates right first")]
    return findings + await check_peers(config, workers, tls)


def _own_certificate(config: Config, roles: frozenset[str]) -> tuple[InternalTls | None, str]:
    """The first that can be used, and why there is none. Any role may ask for health."""
    reason = ""
    for role in (PeerRole.OPERATOR, *(PeerRole(name) for name in sorted(roles))):
        try:
            return InternalTls.of(config, role), ""
        except ConfigError as error:
            reason = error.message
    return None, reason
