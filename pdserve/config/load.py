"""Reads a configuration: YAML file, then environment, then explicit overrides; reports every problem at once.

Environment variables are named PDSERVE__SECTION__KEY, with two underscores everywhere: Kubernetes sets variables such
as PDSERVE_PORT for a Service called "pdserve", and those must never be read as settings.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from pdserve.config.deployment import Deployment
from pdserve.errors import ConfigError

ENV_PREFIX = "PDSERVE__"


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Deployment:
    """Build the configuration from an optional YAML file, the environment, and overrides by dotted path.

    Raises ConfigError that lists every problem with its path, where it came from, and a suggestion for a misspelt key.
    """
    tree: dict[str, Any] = {}
    origin = "configuration"
    if path is not None:
        origin = str(path)
        tree = _read_yaml(Path(path))
    problems: list[str] = []
    sources: dict[str, str] = {}
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if not name.startswith(ENV_PREFIX):
            continue
        dotted = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        sources[dotted] = name
        _put(tree, dotted, value, name, problems)
    for dotted, value in (overrides or {}).items():
        _put(tree, dotted, value, dotted, problems)
    try:
        config = Deployment.model_validate(tree)
    except ValidationError as error:
        problems.extend(_describe(item, sources) for item in error.errors(include_url=False))
    if problems:
        raise ConfigError(f"{origin}: {len(problems)} problem(s)\n" + "\n".join(f"  {p}" for p in problems))
    return config


def config_schema() -> dict[str, Any]:
    """JSON Schema of the YAML file, for editors."""
    return Deployment.model_json_schema()


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a mapping of sections, got {type(tree).__name__}")
    return tree


def _put(tree: dict[str, Any], dotted: str, value: Any, source: str, problems: list[str]) -> None:
    *parents, leaf = dotted.split(".")
    node: Any = tree
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            problems.append(f"{source}: {name!r} is not a section")
            return
    node[leaf] = value


def _describe(item: Any, sources: Mapping[str, str]) -> str:
    location = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = "unknown key"
        close = difflib.get_close_matches(str(item["loc"][-1]), _keys(item["loc"][:-1]), n=1)
        if close:
            message += f", did you mean {close[0]!r}?"
    elif not isinstance(item["input"], dict | list):
        message += f", got {item['input']!r}"
    origin = f" (from {sources[location]})" if location in sources else ""
    return f"{location or 'configuration'}: {message}{origin}"


def _keys(location: tuple[str | int, ...]) -> list[str]:
    """Names that are valid at a place in the configuration."""
    kind: type[BaseModel] = Deployment
    for part in location:
        field = kind.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return []
        kind = field.annotation
    return list(kind.model_fields)
