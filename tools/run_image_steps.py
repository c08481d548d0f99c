"""Build the content of a Dockerfile without a container engine, and run its command: to try it, not to ship it.

Every RUN, COPY, ENV and USER of the file is carried out in a root of its own: an overlay of this machine's root file
system, so that nothing outside changes. That root is not the base image: it has this machine's packages of the system,
and the Python that runs this. Needs root, for mounts and chroot.

    python tools/run_image_steps.py deploy/docker/Dockerfile --content content.txt
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pdserve.testing.dockerfiles import Stage, read_dockerfile

KEPT = ("PIP_INDEX_URL", "PIP_CONFIG_FILE", "PIP_CERT", "SSL_CERT_FILE", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
"""How to reach a package index from here; everything else of the environment stays outside."""
NAMESPACE = "PDSERVE_IMAGE_STEPS"
"""Set in the process that has namespaces of its own: the directory for the root."""


class Root:
    """Where the steps are carried out."""

    def __init__(self, directory: Path, context: Path) -> None:
        self._path = directory / "root"
        self._context = context
        self._ignore = (context / ".dockerignore").read_text().split("\n")
        for name in ("root", "upper", "work"):
            (directory / name).mkdir()
        options = f"lowerdir=/,upperdir={directory}/upper,workdir={directory}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(self._path)], check=True)
        for name, kind in (("proc", "proc"), ("tmp", "tmpfs")):
            subprocess.run(["mount", "-t", kind, kind, str(self._path / name)], check=True)
        subprocess.run(["mount", "--rbind", "/dev", str(self._path / "dev")], check=True)
        # Where the base image has it. Copied, as its own place may be closed to the user of the image; without
        # the packages that are installed there, as the base image has none.
        local = self._path / "usr/local"
        skip = shutil.ignore_patterns("site-packages", "__pycache__")
        shutil.copytree(sys.base_prefix, local, symlinks=True, dirs_exist_ok=True, ignore=skip)
        # Its shared library before the system's of the same name.
        subprocess.run(["chroot", str(self._path), "/sbin/ldconfig", "/usr/local/lib"], check=True)
        (local / "bin/python").unlink(missing_ok=True)
        (local / "bin/python").symlink_to(f"python{sys.version_info[0]}.{sys.version_info[1]}")

    def carry_out(self, stage: Stage) -> dict[str, str]:
        """All steps of a stage. Gives the environment that they have set."""
        environment = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"}
        environment |= {name: os.environ[name] for name in KEPT if name in os.environ}
        directory = "/"
        for step in stage.instructions:
            if step.name in ("ENV", "ARG"):
                for word in shlex.split(step.text):
                    name, _, value = word.partition("=")
                    environment[name] = value.replace("$PATH", environment["PATH"])
            elif step.name == "WORKDIR":
                directory = step.text
                (self._path / directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif step.name == "COPY" and "--from=" not in step.text:
                *sources, target = step.text.split()
                self._copy(sources, self._path / directory.lstrip("/") / target)
            elif step.name == "RUN":
                print(f"[{stage.name}] RUN {step.text[:100]}", flush=True)
                code = self.run(["/bin/sh", "-c", step.text], environment, directory)
                if code != 0:
                    raise SystemExit(f"error: exit code {code} of RUN {step.text}")
        return environment

    def run(self, command: list[str], environment: dict[str, str], directory: str, *, user: str = "0:0") -> int:
        """Run a command inside. Returns its exit code."""
        inside = ["/usr/bin/env", "-C", directory, *command]
        chroot = ["chroot", f"--userspec={user}", str(self._path), *inside]
        return subprocess.run(chroot, env=environment, check=False).returncode

    def _copy(self, sources: list[str], target: Path) -> None:
        for source in sources:
            if f"!{source}" not in self._ignore:
                raise SystemExit(f"error: COPY {source}: .dockerignore leaves it out")
            origin = self._context / source.rstrip("/")
            if origin.is_dir():
                skip = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(origin, target, ignore=skip, dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(origin, target)

    def content(self, directory: str) -> list[str]:
        """Files below a directory with their sizes, largest first, as lines; the total comes first."""
        top = self._path / directory.lstrip("/")
        files = [(path.lstat().st_size, path) for path in top.rglob("*") if path.is_file() and not path.is_symlink()]
        total = sum(size for size, _ in files)
        lines = [f"{total / 2**20:.0f} MiB in {len(files)} files below {directory}"]
        packages = sorted(path.name.removesuffix(".dist-info").replace("-", " ") for path in top.rglob("*.dist-info"))
        lines += [f"package {package}" for package in packages]
        return lines + [f"{size} {path.relative_to(self._path)}" for size, path in sorted(files, reverse=True)]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--content", type=Path, help="write what is in the image to this file")
    parser.add_argument("command", nargs="*", help="instead of the CMD of the file")
    arguments = parser.parse_args()
    if NAMESPACE not in os.environ:
        return _in_a_namespace()
    build, runtime = read_dockerfile(arguments.dockerfile)
    return _try(build, runtime, Root(Path(os.environ[NAMESPACE]), Path.cwd()), arguments)


def _in_a_namespace() -> int:
    """Run this again where nobody else sees its mounts and processes. Both are gone when that ends, however it ends, so
    that deleting the directory cannot reach what was mounted in it. Gives the exit code."""
    # Ends the other process and deletes the directory, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(
        prefix="pdserve-image-", dir="/dev/shm" if _overlay_needs_tmpfs() else None
    ) as name:
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", sys.executable, *sys.argv]
        return subprocess.run(command, env=os.environ | {NAMESPACE: name}, check=False).returncode


def _try(build: Stage, runtime: Stage, root: Root, arguments: argparse.Namespace) -> int:
    begin = time.monotonic()
    root.carry_out(build)
    environment = root.carry_out(runtime)
    print(f"steps carried out in {time.monotonic() - begin:.0f} s", flush=True)
    if arguments.content is not None:
        arguments.content.write_text("\n".join(root.content("/opt/pdserve")) + "\n")
    command = runtime.last("ENTRYPOINT").words + (arguments.command or runtime.last("CMD").words)
    user, where = runtime.last("USER").text, runtime.last("WORKDIR").text
    print(f"{json.dumps(command)} as {user}", flush=True)
    begin = time.monotonic()
    environment = {name: value for name, value in environment.items() if name not in KEPT}
    code = root.run(command, environment, where, user=user)
    print(f"exit code {code} after {time.monotonic() - begin:.0f} s", flush=True)
    return code


def _overlay_needs_tmpfs() -> bool:
    """Whether the file system of temporary files is itself an overlay, on which none can be put."""
    found = subprocess.run(
        ["stat", "-f", "-c", "%T", tempfile.gettempdir()], capture_output=True, text=True, check=True
    )
    return found.stdout.strip() == "overlayfs"


if __name__ == "__main__":
    sys.exit(main())
