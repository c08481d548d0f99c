"""How many files and sockets this process may have open."""

from __future__ import annotations

import resource


def allow_open_files(wanted: int) -> int:
    """Raise the soft limit towards `wanted` as far as the hard one lets it. Gives the limit that holds now.

    Shells and service managers start processes with 1024, which is a tradition of `select` and no decision.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
