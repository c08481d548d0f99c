"""What loading a model into the CPU engine costs in memory, and what is refused because it would not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdserve.config import Config, load_config
from pdserve.engine.cpu import loader
from pdserve.engine.cpu.loader import WORKING_NBYTES, load_cpu_engine
from pdserve.errors import ConfigError
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.tiny_models import TinyOptions, TinyShape, make_tiny_kv
from pdserve.worker.model import load_model

GIB = 1 << 30
SCRIPT = """
import json, re, sys
from pathlib import Path
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.model.source import open_model

def status(name):
    return int(re.search(rf"^{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) << 10

def mapped(file):
    kib, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(file)
        elif inside and line.startswith("Rss:"):
            kib += int(line.split()[1])
    return kib << 10

small, large = sys.argv[1:]
# Imports, machine code, and whatever else the first engine of a process needs.
load_cpu_engine(open_model(small), weights="f16", num_blocks=4, num_threads=1)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here.
source = open_model(large)
source.fingerprint
engine = load_cpu_engine(source, weights="f16", num_blocks=4, num_threads=1)
print(json.dumps({
    "peak": status("VmHWM") - before,
    "resident": status("VmRSS") - before,
    "file": mapped("model.safetensors"),
    "packed": engine._model.nbytes,
}))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def source(small: Path) -> ModelSource:
    return open_model(str(small))


@pytest.mark.timeout(300)
def test_loading_takes_the_packed_weights_once_and_leaves_nothing_of_the_file(small: Path, tmp_path: Path) -> None:
    """A second copy of the weights, or the pages of their file, would make it twice the size."""
    shape = TinyShape(num_layers=5, hidden_size=768, intermediate_size=2048, num_heads=12, num_kv_heads=6)
    large = make_tiny_kv(tmp_path / "large", shape=shape, options=TinyOptions(dtype="float16"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(small), str(large)], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["packed"] > 60e6
    assert found["peak"] < 1.5 * found["packed"], found
    assert found["resident"] < 1.4 * found["packed"], found
    assert found["file"] < 0.1 * found["packed"], found


@pytest.mark.parametrize(
    ("free", "num_blocks", "pool_nbytes", "setting", "message"),
    [
        (GIB, 1 << 20, None, "num_blocks", "use a KV pool of at most 0.7"),
        (GIB, None, 3 * GIB, "kv_cache_bytes", "a KV pool of 3.00 GiB .* use a KV pool of at most 0.7"),
        (WORKING_NBYTES, 1, None, "weights", "use a smaller model or format"),
    ],
)
def test_what_does_not_fit_in_memory_is_refused_before_anything_is_packed(
    source: ModelSource,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    num_blocks: int | None,
    pool_nbytes: int | None,
    setting: str,
    message: str,
) -> None:
    def pack_nothing(*args: object) -> None:
        raise AssertionError("packed what cannot be held")

    monkeypatch.setattr(loader, "available_memory", lambda: free)
    monkeypatch.setattr(loader, "pack_model", pack_nothing)
    with pytest.raises(ConfigError, match=rf"^{setting}: weights of .* {message}") as caught:
        load_cpu_engine(source, num_blocks=num_blocks, kv_cache_bytes=pool_nbytes, num_threads=1)
    assert caught.value.field == setting


def test_a_pool_that_just_fits_is_not_refused(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_cpu_engine(source, num_blocks=64, num_threads=1)
    pool_nbytes = 64 * engine.layout.block_nbytes
    monkeypatch.setattr(loader, "available_memory", lambda: WORKING_NBYTES + (2 << 20) + pool_nbytes)
    assert load_cpu_engine(source, num_blocks=64, num_threads=1).num_blocks == 64


@pytest.mark.parametrize(
    ("threads", "pin_threads", "message"),
    [
        (1, [4096], r"pin_threads: \[4096\] must be 1 different CPUs"),
        (2, [0, 0], "must be 2 different CPUs"),
        (2, [0], "must be 2 different CPUs"),
        (1024, True, "pin_threads: 1024 threads need a CPU each"),
    ],
)
def test_pinning_to_cpus_that_are_not_there_is_refused(
    source: ModelSource, threads: int, pin_threads: bool | list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_cpu_engine(source, num_blocks=4, num_threads=threads, pin_threads=pin_threads)
    assert caught.value.field == "pin_threads"


def test_a_worker_pins_its_kernel_threads_as_configured(small: Path) -> None:
    allowed = os.sched_getaffinity(0)
    last = max(allowed)
    for setting, expected in ((True, {min(allowed)}), ([last], {last}), (False, allowed), ("auto", allowed)):
        overrides = {"model.path": str(small), "kv.num_blocks": 4, "engine.threads": 1, "engine.pin_threads": setting}
        config = load_config(environ={}, overrides={"engine.kind": "cpu", **overrides})
        assert affinity_of_an_engine_thread(config) == expected, setting
        # The rest of the process may go where it likes.
        assert os.sched_getaffinity(0) == allowed


def affinity_of_an_engine_thread(config: Config) -> set[int]:
    found: list[set[int]] = []

    def load() -> None:
        load_model(config)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join(120)
    return found[0]
