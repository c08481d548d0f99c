"""Keys of clients: what one looks like, the file that holds their hashes, and the check of a call.

A key is `pdk-<id>-<secret>`. The id is no secret: it finds the entry. Of the secret, 256 random bits, the file has the
SHA-256: with so many bits nobody can try them all, so a slow hash would only slow down every call.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdserve.errors import ConfigError, UnauthenticatedError

log = logging.getLogger(__name__)

RECHECK_S: Final = 1.0
"""How often the file is looked at, at most."""

_KEY: Final = re.compile(r"pdk-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
_BEARER: Final = "bearer "
_NOBODY: Final = hashlib.sha256(b"").hexdigest()
"""What the secret of an unknown id is compared with, so that it takes as long."""


class ApiKey(BaseModel):
    """One entry of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    """Whose it is, for people."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    max_requests: Annotated[int, Field(ge=1)] | None = None
    """Requests in progress at once. Default: `router.max_requests_per_key`."""
    operator: bool = False
    """Whether it may look after the requests of all keys: where they are and where their time went, and cancel them.
    What is in them stays with the key that made them."""


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[ApiKey, ...] = ()


def new_key(name: str, max_requests: int | None = None, *, operator: bool = False) -> tuple[ApiKey, str]:
    """An entry, and the key itself, which nobody can find out again. Raises ConfigError for a name or a bound that no
    entry can have."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    try:
        entry = ApiKey(id=key_id, name=name, sha256=_digest(secret), max_requests=max_requests, operator=operator)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False)
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}, got {first['input']!r}") from error
    return entry, f"pdk-{key_id}-{secret}"


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The entries of a file. Raises ConfigError; the message shows no hash."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no YAML in UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason}", field="router.keys_file") from error
    try:
        keys = _KeyFile.model_validate({} if tree is None else tree).keys
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}" for item in error.errors(include_url=False)
        )
        raise ConfigError(f"{path}: {problems}", field="router.keys_file") from error
    ids = [key.id for key in keys]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{path}: the id {next(i for i in ids if ids.count(i) > 1)} is there twice")
    return keys


def write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file at once, readable by its owner alone. Raises ConfigError."""
    tree = {"keys": [key.model_dump(exclude_none=True, exclude_defaults=True) for key in keys]}
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                yaml.safe_dump(tree, file, sort_keys=False)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


class KeyRing:
    """The keys that are good now: those of a file, as it is. Belongs to one event loop."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError if the file cannot be used. Later, one that cannot leaves the keys as they were."""
        self._path = path
        self._clock = clock
        self._looked_at = clock()
        self._signature = _signature(path)
        self._keys = self._index()

    def authenticate(self, authorization: str | None) -> ApiKey:
        """The key of a call, by its `authorization` header. Raises UnauthenticatedError, whose details have `reason`:
        `no_key` or `wrong_key`."""
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            raise UnauthenticatedError(
                "no API key: send it as `Authorization: Bearer KEY`", field="authorization", reason="no_key"
            )
        parts = _KEY.fullmatch(authorization[len(_BEARER) :].strip())
        key_id, secret = parts.groups() if parts is not None else ("", "")
        key = self._current().get(key_id)
        is_right = hmac.compare_digest(_digest(secret), _NOBODY if key is None else key.sha256)
        if key is None or not is_right:
            raise UnauthenticatedError("the API key is not valid here", field="authorization", reason="wrong_key")
        return key

    def _current(self) -> Mapping[str, ApiKey]:
        now = self._clock()
        if now - self._looked_at >= RECHECK_S:
            self._looked_at = now
            try:
                signature = _signature(self._path)
                if signature != self._signature:
                    self._signature = signature
                    self._keys = self._index()
                    log.info("API keys were replaced", extra={"keys": len(self._keys)})
            except ConfigError as error:
                log.warning("replaced API keys cannot be used, the ones before go on: %s", error.message)
        return self._keys

    def _index(self) -> Mapping[str, ApiKey]:
        return {key.id: key for key in read_keys(self._path)}


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _signature(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", field="router.keys_file") from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
