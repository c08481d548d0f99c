"""What is installed: our names, no torch where none is needed, and a wheel that runs from anywhere."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pdserve import __version__

ROOT = Path(__file__).parents[2]
PACKAGES = ("pdserve", "kv_transfer", "router", "prefill_worker", "decode_worker")


def run_python(code: str, **arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy so that no build output stays in it."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
            "--wheel-dir", str(out), str(source),
        ],
        check=True,
    )  # fmt: skip
    (built,) = out.glob("*.whl")
    return built


def test_our_import_names_belong_to_our_distribution_alone() -> None:
    owners = importlib.metadata.packages_distributions()
    top_level = {name: owners[name] for name in PACKAGES if name in owners}
    assert all(set(names) == {"pdserve"} for names in top_level.values()), top_level
    # Other distributions may well ship a module called proto; ours must not be what is imported under that name.
    assert "pdserve" not in owners.get("proto", [])
    assert "pdserve" not in owners.get("tests", [])


def test_the_router_and_the_client_start_without_torch() -> None:
    out = run_python(
        "import sys, router, router.service, pdserve.client;"
        "print([m for m in ('torch', 'kv_transfer', 'pdserve.engine') if m in sys.modules])"
    )
    assert out == "[]\n"


def test_the_wheel_holds_our_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert wheel.name == f"pdserve-{__version__}-py3-none-any.whl"
    info = f"pdserve-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    for package in PACKAGES:
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    in_tree = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names - {n for n in names if n.startswith(info)} == in_tree


def test_the_installed_wheel_runs_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")} | {"PYTHONPATH": str(site)}

    def pdserve(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pdserve", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = subprocess.run(
        [sys.executable, "-c", "import pdserve, router; print(pdserve.__file__, router.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.split() == [str(site / name / "__init__.py") for name in ("pdserve", "router")]
    assert pdserve("--version") == f"pdserve {__version__}\n"
    assert pdserve("config", "check") == "ok: defaults and environment\n"


def test_the_version_is_that_of_the_project() -> None:
    assert importlib.metadata.version("pdserve") == __version__


def test_the_console_script_is_installed() -> None:
    (script,) = (e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "pdserve")
    assert script.value == "pdserve.cli.main:main"
