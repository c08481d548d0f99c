"""How a process shows redis who it is, and checks who redis is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import unquote, urlsplit, urlunsplit

from redis.credentials import CredentialProvider

from pdserve.config.schema import StoreSection
from pdserve.errors import ConfigError

PASSWORD_VARIABLE: Final = "PDSERVE_REDIS_PASSWORD"  # noqa: S105 - the name of one


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLogin:
    """What is not in the URL. Holds no password: that is read whenever a connection is made."""

    username: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @classmethod
    def of(cls, store: StoreSection) -> Self:
        """As the configuration says. Raises ConfigError for a file that cannot be read."""
        for field in ("password_file", "ca_file", "cert_file", "key_file"):
            path = store.model_dump()[field]
            if path is not None:
                try:
                    Path(path).read_bytes()
                except OSError as error:
                    message = f"store.{field}: {path} cannot be read: {error.strerror}"
                    raise ConfigError(message, field=f"store.{field}") from error
        return cls(
            username=store.username,
            password_file=store.password_file,
            ca_file=store.ca_file,
            cert_file=store.cert_file,
            key_file=store.key_file,
        )

    def tls_options(self) -> dict[str, object]:
        """Arguments of redis-py's TLS connections, for rediss://."""
        options = {"ssl_ca_certs": self.ca_file, "ssl_certfile": self.cert_file, "ssl_keyfile": self.key_file}
        return {name: path for name, path in options.items() if path is not None}

    def provider(self, url: str, environ: Mapping[str, str] = os.environ) -> tuple[str, CredentialProvider | None]:
        """`url` without what the provider knows instead, and the provider; None if the URL says all there is."""
        if self.username is None and self.password_file is None and PASSWORD_VARIABLE not in environ:
            return url, None
        parts = urlsplit(url)
        userinfo, _, host = parts.netloc.rpartition("@")
        user, _, password = userinfo.partition(":")
        provider = _Provider(self.username or unquote(user) or None, self.password_file, environ, unquote(password))
        return urlunsplit(parts._replace(netloc=host)), provider


class _Provider(CredentialProvider):
    def __init__(
        self, username: str | None, password_file: str | None, environ: Mapping[str, str], otherwise: str
    ) -> None:
        self._username = username
        self._password_file = password_file
        self._environ = environ
        self._otherwise = otherwise

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Asked for each connection. An OSError for an unreadable file fails that connection."""
        password = self._environ.get(PASSWORD_VARIABLE)
        if password is None and self._password_file is not None:
            password = Path(self._password_file).read_text(encoding="utf-8").rstrip("\n")
        password = self._otherwise if password is None else password
        return (password,) if self._username is None else (self._username, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same."""
        return self.get_credentials()
