"""Certificates: readable, fitting, and not about to expire."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from pdserve.config import Config
from pdserve.doctor.findings import Finding, ok, problem, warning
from pdserve.errors import ConfigError
from pdserve.security.identity import PeerRole
from pdserve.security.internal import InternalTls
from pdserve.security.public import PublicTls

SOON: Final = timedelta(days=14)
"""A certificate that ends within this time should have been renewed."""


def check_certificates(config: Config, roles: frozenset[str], now: datetime | None = None) -> list[Finding]:
    """Those of `tls.internal` for the roles, and of `tls.public`. Nothing without TLS."""
    moment = now or datetime.now(UTC)
    findings = []
    if config.tls.internal is not None:
        pattern = config.tls.internal.cert_file
        findings += [_internal(config, PeerRole(name), pattern, moment) for name in sorted(roles)]
    if config.tls.public is not None and "router" in roles:
        findings.append(_public(config, moment))
    return findings


def _internal(config: Config, role: PeerRole, pattern: str, now: datetime) -> Finding:
    try:
        InternalTls.of(config, role)
    except ConfigError as error:
        return _unusable(
            error, f"`pdserve certs DIRECTORY` makes some for {config.cluster}; docs/security.md says what they need"
        )
    return _expiry(f"tls.internal, {role}", Path(pattern.replace("{role}", role)), now)


def _public(config: Config, now: datetime) -> Finding:
    section = config.tls.public
    assert section is not None
    try:
        PublicTls(section)
    except ConfigError as error:
        return _unusable(error, "put a certificate and its key there, in PEM and without a password")
    return _expiry("tls.public", Path(section.cert_file), now)


def _unusable(error: ConfigError, otherwise: str) -> Finding:
    expired = "expired" in error.message
    unreadable = "cannot be read" in error.message
    remedy = otherwise
    if expired:
        remedy = "renew it: `pdserve certs DIRECTORY` issues new ones, and processes read them without a restart"
    elif unreadable:
        remedy = "mount or copy the file there, readable by the user that pdserve runs as"
    return problem("certificates", error.message, remedy)


def _expiry(what: str, path: Path, now: datetime) -> Finding:
    ends = end_of(path)
    if ends is None:
        return ok("certificates", f"{what}: {path} can be used")
    if ends <= now:
        return problem("certificates", f"{what}: {path} has expired on {ends:%Y-%m-%d}", "renew it")
    if ends - now < SOON:
        return warning(
            "certificates", f"{what}: {path} expires on {ends:%Y-%m-%d %H:%M} UTC", "renew it, no restart is needed"
        )
    return ok("certificates", f"{what}: {path} is good until {ends:%Y-%m-%d}")


def end_of(path: Path) -> datetime | None:
    """When a certificate ends; None where there is no `openssl` to say so, or it cannot read it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        return None
    done = subprocess.run(  # noqa: S603 - arguments of ours, no shell
        [openssl, "x509", "-noout", "-enddate", "-in", str(path)], capture_output=True, text=True, check=False
    )
    _, found, text = done.stdout.strip().partition("notAfter=")
    if not found:
        return None
    return datetime.strptime(text, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC)
