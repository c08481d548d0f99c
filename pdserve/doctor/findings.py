"""What an examination says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """It works, and worse than it could, or not for long."""
    PROBLEM = "problem"
    """It will not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """Stable name, for scripts."""
    verdict: Verdict
    message: str
    """What was found: one line that names the setting, the file or the peer."""
    remedy: str = ""
    """What to do. Empty if all is well."""


def ok(check: str, message: str) -> Finding:
    """Nothing to do."""
    return Finding(check=check, verdict=Verdict.OK, message=message)


def warning(check: str, message: str, remedy: str) -> Finding:
    """See Verdict.WARNING."""
    return Finding(check=check, verdict=Verdict.WARNING, message=message, remedy=remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    """See Verdict.PROBLEM."""
    return Finding(check=check, verdict=Verdict.PROBLEM, message=message, remedy=remedy)
