"""Virtual environments for clients of other projects, whose dependencies exclude each other and ours.

`python -m pdserve.testing.client_environments REQUIREMENTS_DIR [PIP_ARGUMENT...]` makes one for each file
`NAME.txt`, outside the source tree. A file that has changed gets a new environment; the old one stays where it is, for
branches that still need it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CACHE_VARIABLE: Final = "PDSERVE_CLIENTS_CACHE"
"""Environment variable with the folder of all environments. Default: `pdserve/clients` in the user's cache."""

_COMPLETE = "complete"
"""Written last, so that what an interrupted run has left is made again."""


class ClientEnvironments:
    """The environments of one folder of requirements."""

    def __init__(self, requirements: Path) -> None:
        self._requirements = requirements

    @property
    def names(self) -> tuple[str, ...]:
        """One for each file of requirements."""
        return tuple(sorted(path.stem for path in self._requirements.glob("*.txt")))

    def directory(self, name: str) -> Path:
        """Where the environment is or will be. Differs with the requirements and the version of Python."""
        wanted = (self._requirements / f"{name}.txt").read_bytes() + sys.version.encode()
        return cache_directory() / f"{name}-{hashlib.sha256(wanted).hexdigest()[:12]}"

    def python(self, name: str) -> Path | None:
        """Interpreter of an environment; None if that has not been made."""
        directory = self.directory(name)
        return directory / "bin" / "python" if (directory / _COMPLETE).exists() else None

    def create(self, name: str, pip_arguments: Sequence[str] = ()) -> Path:
        """The interpreter, after installing what is missing. Raises subprocess.CalledProcessError if pip fails."""
        if (python := self.python(name)) is not None:
            return python
        directory = self.directory(name)
        venv.EnvBuilder(with_pip=True, clear=True).create(directory)
        python = directory / "bin" / "python"
        pip: list[str | Path] = [
            python,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--progress-bar",
            "off",
        ]
        subprocess.run([*pip, *pip_arguments, "-r", self._requirements / f"{name}.txt"], check=True)
        (directory / _COMPLETE).touch()
        return python


def cache_directory() -> Path:
    """Folder of all environments."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "clients"


def main(arguments: Sequence[str]) -> None:
    """Make all environments of a folder; those that are there already cost nothing."""
    environments = ClientEnvironments(Path(arguments[0]))
    for name in environments.names:
        if environments.python(name) is None:
            began = time.monotonic()
            print(f"installing {name} in {environments.directory(name)}", flush=True)  # noqa: T201
            environments.create(name, arguments[1:])
            print(f"installed {name} in {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
