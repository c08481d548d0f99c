"""Redis: reachable, willing, ours, and of the same opinion about the time."""

from __future__ import annotations

import time
from typing import Final

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from pdserve.config import Config
from pdserve.doctor.findings import Finding, ok, problem, warning
from pdserve.errors import ConfigError, StoreError
from pdserve.store.client import Store
from pdserve.store.login import StoreLogin
from pdserve.store.registry import WorkerDirectory
from pdserve.worker_info import WorkerInfo

MAX_SKEW_S: Final = 2.0
"""Leases are counted by redis's clock alone, so nothing breaks; but logs and records cannot be put in order any more,
and certificates that are new or about to end are refused by some."""


async def check_store(config: Config) -> tuple[list[Finding], list[WorkerInfo]]:
    """The findings, and the workers that are registered; none if redis cannot be asked."""
    if config.store.url == "embedded":
        return [ok("redis", "store.url is embedded: `pdserve up` starts one")], []
    try:
        store = await Store.connect(
            config.store.url, config.cluster, timeout_s=config.store.timeout_s, login=StoreLogin.of(config.store)
        )
    except ConfigError as error:
        return [problem("redis", error.message, f"correct {error.field or 'store.url'}")], []
    except StoreError as error:
        return [_refused(error)], []
    try:
        seconds, microseconds = await store.command("TIME")
        skew_s = time.time() - (int(seconds) + int(microseconds) / 1e6)
        workers = [record.info for record in await WorkerDirectory(store).list_workers()]
    except StoreError as error:
        return [_refused(error)], []
    finally:
        await store.aclose()
    return [ok("redis", f"{store.url} answers, {len(workers)} workers are registered"), check_skew(skew_s)], workers


def check_skew(skew_s: float) -> Finding:
    """`skew_s`: how far this machine's clock is before redis's."""
    if abs(skew_s) <= MAX_SKEW_S:
        return ok("clock", f"{abs(skew_s):.1f} s from redis's")
    side = "ahead of" if skew_s > 0 else "behind"
    return warning(
        "clock",
        f"this machine is {abs(skew_s):.0f} s {side} redis's: times in logs and records do not fit together",
        "set the clock by NTP on both machines (`timedatectl`, chrony)",
    )


def _refused(error: StoreError) -> Finding:
    cause = error.__cause__
    if isinstance(cause, NoPermissionError):
        return problem(
            "redis", error.message, "give the user the rights that docs/security.md names (ACL SETUSER pdserve ...)"
        )
    if isinstance(cause, AuthenticationError) or _speaks_of_passwords(cause):
        return problem(
            "redis",
            error.message,
            "correct store.username and store.password_file, or PDSERVE_REDIS_PASSWORD, which comes first",
        )
    if "newer pdserve" in error.message or "schema version" in error.message:
        return problem("redis", error.message, "see above; `cluster` keeps deployments apart in one redis")
    return problem(
        "redis",
        error.message,
        "is it running, is store.url right, and does a firewall or a network policy let this machine through? Try "
        "`redis-cli -u URL ping` from here",
    )


def _speaks_of_passwords(cause: BaseException | None) -> bool:
    text = str(cause).lower()
    return isinstance(cause, RedisError) and any(word in text for word in ("auth", "password"))
