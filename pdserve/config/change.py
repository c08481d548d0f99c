"""What differs between two configurations of a deployment that runs: who reads it, and what cannot change meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.config.schema import Config

WINDOW = ("attention_window", "attention_sinks")
"""Of `engine`: what a router reads of it, as the longest prompt depends on it."""

FIXED = (
    "cluster",
    "store.url",
    "model",
    "engine.kind",
    "engine.dtype",
    "engine.weights",
    *(f"engine.{name}" for name in WINDOW),
    "kv.dtype",
    "tls.internal",
)
"""Settings that cannot change while the deployment runs: half of the processes would not understand the other half, or,
with `kv.dtype`, neither take over its streams and prefixes nor give its answers."""

CODECS = ("transfer.codec", "transfer.accept_codecs")
"""Settings that can change only so far that old and new workers understand each other."""


def fixed_changes(old: Config, new: Config) -> list[str]:
    """Those of FIXED that differ, and those of CODECS where the prefill workers of one configuration would send what
    the decode workers of the other do not take."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    names = FIXED
    if old.transfer.codec not in new.transfer.accept_codecs or new.transfer.codec not in old.transfer.accept_codecs:
        names += CODECS
    return [path for path in names if _at(before, path) != _at(after, path)]


def settings_read(config: Config, role: str) -> dict[str, Any]:
    """What a process of this role (`router`, `prefill`, `decode`) reads, as JSON: whole sections, and of `engine` only
    WINDOW for a router.

    What a process never reads must not make it be replaced.
    """
    unread = {"local", "router", "prefill", "decode", "deployment"} - {role}
    if role == "router":
        unread |= {"kv", "transfer"}
    found = {name: value for name, value in config.model_dump(mode="json").items() if name not in unread}
    if role == "router":
        found["engine"] = {name: found["engine"][name] for name in WINDOW}
    return found


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of what differs, dotted; without values, which may be secret."""
    old, new = _flat(before), _flat(after)
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[part]
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
