"""A certificate authority in a directory, for development and for deployments that have none.

Made with the `openssl` program, which is on nearly every machine: a library that could sign certificates would be in
every installation for something that most never do. Keys are ECDSA on P-256.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from pdserve.errors import ConfigError
from pdserve.security.identity import Identity

CA_DAYS: Final = 3650
_CA_CERT: Final = "ca.pem"
_CA_KEY: Final = "ca-key.pem"


class Authority:
    """See the module."""

    def __init__(self, directory: Path) -> None:
        """Where everything is. Raises ConfigError if there is no `openssl`."""
        found = shutil.which("openssl")
        if found is None:
            raise ConfigError("certificates are made with the program openssl, which is not installed")
        self._openssl = found
        self._directory = directory

    @property
    def cert_file(self) -> Path:
        """The authority's own certificate, to be trusted by every process."""
        return self._directory / _CA_CERT

    def ensure(self, cluster: str) -> bool:
        """Make the authority unless it is there. True if it was made. Raises ConfigError."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self._directory}: cannot be made: {error.strerror}") from error
        here = [(self._directory / name).exists() for name in (_CA_CERT, _CA_KEY)]
        if all(here):
            return False
        if any(here):
            raise ConfigError(
                f"{self._directory}: has only one of {_CA_CERT} and {_CA_KEY}; remove it, or add the other"
            )
        self._make_key(_CA_KEY)
        self._run(
            *("req", "-x509", "-new", "-key", _CA_KEY, "-subj", f"/CN=pdserve {cluster}", "-days", str(CA_DAYS)),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign", "-out", _CA_CERT),
        )
        return True

    def issue_internal(self, identity: Identity, *, days: int) -> tuple[Path, Path]:
        """Certificate and key of a process, named after its role. They replace those that are there."""
        names = [f"URI:{identity.uri}", *(f"DNS:{name}" for name in identity.dns_names)]
        return self._issue(str(identity.role), names, "serverAuth,clientAuth", days)

    def issue_public(self, hosts: Sequence[str], *, days: int) -> tuple[Path, Path]:
        """Certificate and key for what clients connect to: host names and addresses."""
        return self._issue("public", [_host(host) for host in hosts], "serverAuth", days)

    def _issue(self, name: str, names: Sequence[str], usage: str, days: int) -> tuple[Path, Path]:
        """`days` may be negative, for a certificate that has expired."""
        cert, key = f"{name}.pem", f"{name}-key.pem"
        extensions = (
            "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
            f"extendedKeyUsage={usage}\nsubjectAltName={','.join(names)}\n"
        )
        with tempfile.TemporaryDirectory(prefix=".issue-", dir=self._directory) as temporary:
            at = Path(temporary).name
            (Path(temporary) / "extensions").write_text(extensions, encoding="utf-8")
            self._make_key(f"{at}/key")
            self._run("req", "-new", "-key", f"{at}/key", "-subj", f"/CN={name}", "-out", f"{at}/request")
            self._run(
                *("x509", "-req", "-in", f"{at}/request", "-CA", _CA_CERT, "-CAkey", _CA_KEY),
                *("-set_serial", f"0x{os.urandom(16).hex()}", "-days", str(days)),
                *("-extfile", f"{at}/extensions", "-out", f"{at}/cert"),
            )
            # Each is replaced at once; a process that looks between the two keeps what it has until both are there.
            (self._directory / at / "key").replace(self._directory / key)
            (self._directory / at / "cert").replace(self._directory / cert)
        return self._directory / cert, self._directory / key

    def _make_key(self, name: str) -> None:
        path = self._directory / name
        path.touch(mode=0o600)
        self._run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", name)

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(  # noqa: S603 - arguments of ours, no shell
            [self._openssl, *arguments], cwd=self._directory, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            problem = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ConfigError(f"openssl {arguments[0]} failed in {self._directory}: {problem}")


def _host(host: str) -> str:
    try:
        return f"IP:{ip_address(host)}"
    except ValueError:
        if not host or any(c in host for c in ",\n :/"):
            raise ConfigError(f"host {host!r}: must be a name or an address") from None
        return f"DNS:{host}"
