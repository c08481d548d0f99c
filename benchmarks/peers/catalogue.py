"""Which peers there are, where they lie in the cache, and what is missing of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.workloads import Contestant, PeerError
from benchmarks.peers.ctranslate2_model import QUANTIZATIONS
from benchmarks.peers.llama_cpp import FORMATS, LlamaCpp, missing_programs, model_files
from benchmarks.peers.worker_process import WorkerProcess

ROOT = Path(__file__).parents[2]
PEERS = ("llama.cpp", "transformers", "ctranslate2", "vllm")


def default_cache() -> Path:
    """Outside the tree, so that neither `make clean` nor a fresh clone loses what took long to build."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Places in the cache."""

    cache: Path
    model: Path
    """The packaged model file."""
    llama_programs: Path | None = None
    """Directory of llama.cpp's programs, if not in the cache."""

    @property
    def llama_source(self) -> Path:
        """Source tree of llama.cpp; its programs are built below it."""
        return self.cache / "llama.cpp"

    @property
    def llama_bin(self) -> Path:
        """Directory of llama.cpp's programs."""
        return self.llama_programs or self.llama_source / "build" / "bin"

    @property
    def llama_models(self) -> Path:
        """The model in llama.cpp's formats."""
        return self.cache / "models"

    @property
    def ctranslate2_site(self) -> Path:
        """Python packages of CTranslate2, not visible to our own environment."""
        return self.cache / "ctranslate2" / "site"

    @property
    def ctranslate2_model(self) -> Path:
        """Converted models, a directory for each of `QUANTIZATIONS`."""
        return self.cache / "ctranslate2" / "model"

    @property
    def vllm_python(self) -> Path:
        """Interpreter of an environment with vLLM."""
        return self.cache / "vllm" / "bin" / "python"

    @property
    def hf_model(self) -> Path:
        """The model as a float32 Hugging Face directory without tokenizer."""
        return self.cache / "models" / "float32"

    def python_path(self, *more: Path) -> dict[str, str]:
        """Environment in which a worker finds `benchmarks`."""
        return {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *more)))}


@dataclass(slots=True)
class Found:
    """What there is to compare with."""

    contestants: list[Contestant] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Peers that are not compared with, and why."""


def find_peers(names: list[str] | None, paths: Paths, threads: int) -> Found:
    """The peers of these names; None: all that are installed. What is missing is no error, but is reported."""
    find: dict[str, Callable[[Paths, int], list[Contestant]]] = {
        "llama.cpp": _llama_cpp,
        "transformers": _transformers,
        "ctranslate2": _ctranslate2,
        "vllm": _vllm,
    }
    found = Found(missing=dict.fromkeys(PEERS, "not asked for"))
    for name in PEERS if names is None else names:
        try:
            found.contestants += find[name](paths, threads)
            del found.missing[name]
        except PeerError as error:
            found.missing[name] = str(error)
    return found


def _llama_cpp(paths: Paths, threads: int) -> list[Contestant]:
    if missing := missing_programs(paths.llama_bin):
        raise PeerError(f"{paths.llama_bin} has no {', '.join(missing)}; run benchmarks/peers/setup.py")
    files = model_files(paths.llama_bin, paths.model, paths.llama_models)
    return [LlamaCpp(paths.llama_bin, files[name], name, threads) for name in FORMATS]


def _transformers(paths: Paths, threads: int) -> list[Contestant]:
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        raise PeerError(f"not installed here: {', '.join(absent)}; pip install 'pdserve[dev]'")
    script = Path(__file__).with_name("transformers_worker.py")
    return [
        WorkerProcess(
            f"transformers {weights}", script, [str(paths.model), str(threads), weights],
            environment={**paths.python_path(), "OMP_NUM_THREADS": str(threads)},
        )
        for weights in ("fp32", "int8")
    ]  # fmt: skip


def _ctranslate2(paths: Paths, threads: int) -> list[Contestant]:
    models = [paths.ctranslate2_model / name for name in QUANTIZATIONS]
    if not all(path.is_dir() for path in (paths.ctranslate2_site, *models)):
        raise PeerError(f"not in {paths.ctranslate2_site.parent}; run benchmarks/peers/setup.py")
    script = Path(__file__).with_name("ctranslate2_worker.py")
    return [
        WorkerProcess(
            f"CTranslate2 {model.name}", script,
            [str(model), str(threads), "float32" if model.name == "float32" else "int8_float32"],
            environment={**paths.python_path(paths.ctranslate2_site), "OMP_NUM_THREADS": str(threads)},
        )
        for model in models
    ]  # fmt: skip


def _vllm(paths: Paths, threads: int) -> list[Contestant]:
    if not paths.vllm_python.is_file():
        raise PeerError(f"{paths.vllm_python} is not there; benchmarks/README.md says how to install vLLM for CPUs")
    if not paths.hf_model.is_dir():
        raise PeerError(f"{paths.hf_model} is not there; run benchmarks/peers/setup.py --peers vllm")
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return [
        WorkerProcess(
            "vLLM fp32", Path(__file__).with_name("vllm_worker.py"), [str(paths.hf_model)], python=paths.vllm_python,
            environment={
                **paths.python_path(),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                # vLLM keeps a core for itself unless told not to.
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "OMP_NUM_THREADS": str(threads),
            },
        )
    ]  # fmt: skip
