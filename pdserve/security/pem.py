"""Certificates in files: reading them, checking that they can work, and noticing that they were replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.errors import ConfigError

log = logging.getLogger(__name__)

RECHECK_S: Final = 1.0
"""How often files are looked at, at most. Only a connection that begins makes anybody look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """The content of the files at one time, PEM."""

    cert: bytes
    """The certificate, and those between it and the authority."""
    key: bytes
    ca: bytes | None
    """Authorities to trust; None if the other side need not show a certificate."""
    version: int
    """Grows with every replacement."""


class WatchedPem:
    """Files that may be replaced while the process runs, by renaming or in place. Any thread may ask.

    Files that do not fit each other, as in the middle of a replacement, are not used: the last good ones are.
    """

    def __init__(
        self,
        field: str,
        cert_file: str,
        key_file: str,
        ca_file: str | None,
        check: Callable[[Material], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`field` is the section of the configuration, for messages. `check` raises ConfigError for what cannot work.

        Raises ConfigError.
        """
        self._field = field
        self._files = {"cert_file": Path(cert_file), "key_file": Path(key_file)}
        if ca_file is not None:
            self._files["ca_file"] = Path(ca_file)
        self._check = check
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = clock()
        self._signature = self._stat()
        self._material = self._read(version=1)
        self.num_failed_reloads = 0
        """Replacements that could not be used."""

    def current(self) -> Material:
        """What to use for a connection that begins now. Never raises."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= RECHECK_S:
                self._looked_at = now
                self._reload()
            return self._material

    def _reload(self) -> None:
        try:
            signature = self._stat()
            if signature == self._signature:
                return
            self._signature = signature
            self._material = self._read(version=self._material.version + 1)
            log.info("certificates were replaced", extra={"setting": self._field})
        except ConfigError as error:
            self.num_failed_reloads += 1
            log.warning("replaced certificates cannot be used, the ones before go on: %s", error.message)

    def _stat(self) -> tuple[tuple[int, int, int], ...]:
        """Changes whenever a file is replaced. Raises ConfigError."""
        found = []
        for name, path in self._files.items():
            try:
                stat = path.stat()
            except OSError as error:
                raise self._unreadable(name, path, error) from error
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(found)

    def _read(self, version: int) -> Material:
        contents = {}
        for name, path in self._files.items():
            try:
                contents[name] = path.read_bytes()
            except OSError as error:
                raise self._unreadable(name, path, error) from error
        material = Material(
            cert=contents["cert_file"], key=contents["key_file"], ca=contents.get("ca_file"), version=version
        )
        try:
            self._check(material)
        except ConfigError as error:
            files = ", ".join(str(path) for path in self._files.values())
            raise ConfigError(f"{self._field}: {error.message} ({files})", field=self._field) from error
        return material

    def _unreadable(self, name: str, path: Path, error: OSError) -> ConfigError:
        field = f"{self._field}.{name}"
        return ConfigError(f"{field}: {path} cannot be read: {error.strerror}", field=field)


def make_context(material: Material, *, server: bool, require_peer: bool) -> ssl.SSLContext:
    """A context of Python's TLS. `require_peer`: the other side must have a certificate of `material.ca`; whose, the
    caller checks. Raises ConfigError if the material cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED if require_peer else ssl.CERT_NONE
    try:
        with _as_file(material.cert + b"\n" + material.key) as path:
            # Without a password of our own, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(path, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"certificate and key cannot be used, or do not belong together: {error}") from error
    if require_peer:
        try:
            context.load_verify_locations(cadata=(material.ca or b"").decode("ascii", "replace"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"the authority's certificate cannot be used: {error}") from error
    return context


def names_by_handshake(material: Material) -> tuple[str, ...]:
    """The alternative names of the certificate, after a handshake of both sides with each other in memory: it holds for
    servers and clients, has not expired, and comes from the authority. Raises ConfigError that says what is wrong."""
    server = make_context(material, server=True, require_peer=True)
    client = make_context(material, server=False, require_peer=True)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    left = [ours, theirs]
    try:
        for _ in range(8):
            for side in tuple(left):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
                    left.remove(side)
        # In TLS 1.3 the server's verdict on the client comes after the client's own handshake.
        theirs.write(b"x")
        ours.read(1)
    except ssl.SSLError as error:
        reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        raise ConfigError(f"the certificate cannot be used with this authority: {reason or error}") from error
    return alternative_names(ours)


def alternative_names(connection: ssl.SSLObject) -> tuple[str, ...]:
    """Of the certificate that the other side has shown; without their kinds."""
    # Typed as a mapping of any of several shapes.
    found: Any = (connection.getpeercert() or {}).get("subjectAltName", ())
    return tuple(value for _, value in found)


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path under which `content` can be read, that is in no file system."""
    descriptor = os.memfd_create("pem")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
