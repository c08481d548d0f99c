"""llama.cpp as a peer: its own benchmark programs on files of several formats.

`llama-bench` gives prompts and single streams, `llama-batched-bench` batches. Neither draws tokens or detokenizes.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.workloads import Decode, PeerError, Prefill, Samples, Workload

PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize")
FORMATS = ("Q4_1", "Q4_0", "Q8_0", "F16", "F32")
PACKAGED_FORMAT = "Q4_1"
"""Of the model file itself; the other formats are made from it."""

_LONG_PROMPT = 1024
"""From here on a warm-up run would only take time: what it saves is lost in seconds of computing."""


class LlamaCpp:
    """One format of the model. Implements `Contestant`; every measurement is a process of its own."""

    def __init__(self, programs: Path, model: Path, format_name: str, threads: int) -> None:
        self._programs, self._model, self._format, self._threads = programs, model, format_name, threads

    @property
    def name(self) -> str:
        """See `Contestant`."""
        return f"llama.cpp {self._format}"

    def prepare(self) -> None:
        """Nothing stays between measurements."""

    def close(self) -> None:
        """Nothing stays between measurements."""

    def measure(self, workloads: Sequence[Workload]) -> Samples:
        """See `Contestant`."""
        samples: Samples = defaultdict(list)
        self._prompts([w for w in workloads if isinstance(w, Prefill) and w.tokens < _LONG_PROMPT], True, samples)
        self._prompts([w for w in workloads if isinstance(w, Prefill) and w.tokens >= _LONG_PROMPT], False, samples)
        by_length: dict[tuple[int, int], list[Decode]] = defaultdict(list)
        for w in workloads:
            if isinstance(w, Decode):
                by_length[w.context, w.steps].append(w)
        for group in by_length.values():
            self._streams([w for w in group if w.batch == 1], samples)
            self._batches([w for w in group if w.batch > 1], samples)
        return dict(samples)

    def _prompts(self, workloads: Sequence[Prefill], warm_up: bool, samples: Samples) -> None:
        if not workloads:
            return
        lengths = ",".join(str(w.tokens) for w in workloads)
        rest = ["-r", "2"] if warm_up else ["-r", "1", "--no-warmup"]
        for row in self._llama_bench(["-p", lengths, "-n", "0", *rest]):
            samples[Prefill(tokens=row["n_prompt"])].extend(row["samples_ts"])

    def _streams(self, workloads: Sequence[Decode], samples: Samples) -> None:
        for w in workloads:
            for row in self._llama_bench(["-p", "0", "-n", str(w.steps), "-d", str(w.context), "-r", "2"]):
                samples[w].extend(row["samples_ts"])

    def _llama_bench(self, arguments: Sequence[str]) -> list[dict[str, Any]]:
        output = self._run("llama-bench", ["-m", str(self._model), "-t", str(self._threads), "-o", "json", *arguments])
        rows: list[dict[str, Any]] = json.loads(output)
        return rows

    def _batches(self, workloads: Sequence[Decode], samples: Samples) -> None:
        if not workloads:
            return
        context, steps = workloads[0].context, workloads[0].steps
        largest = max(w.batch for w in workloads)
        threads = str(self._threads)
        output = self._run(
            "llama-batched-bench",
            [
                "-m", str(self._model), "-t", threads, "-tb", threads, "-c", str(largest * (context + steps)),
                "-npp", str(context), "-ntg", str(steps), "-npl", ",".join(str(w.batch) for w in workloads),
                # One prompt for all streams: only decoding is looked at, and each stream gets a copy of its KV.
                "-pps", "--output-format", "jsonl",
            ],
        )  # fmt: skip
        by_batch = {w.batch: w for w in workloads}
        for line in output.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                samples[by_batch[row["pl"]]].append(row["speed_tg"])
        missing = [w.name for w in workloads if not samples.get(w)]
        if missing:
            raise PeerError(f"llama-batched-bench gave no result for {', '.join(missing)}")

    def _run(self, program: str, arguments: Sequence[str]) -> str:
        done = subprocess.run([self._programs / program, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PeerError(f"{program} ended with {done.returncode}: {_last_line(done.stderr)}")
        return done.stdout


def missing_programs(programs: Path) -> list[str]:
    """Those of `PROGRAMS` that are not in the directory."""
    return [name for name in PROGRAMS if not (programs / name).is_file()]


def model_files(programs: Path, packaged: Path, directory: Path) -> dict[str, Path]:
    """The model in every format: the packaged file, and others that are made from it in `directory` if not there."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {PACKAGED_FORMAT: packaged}
    for name in FORMATS:
        if name == PACKAGED_FORMAT:
            continue
        files[name] = directory / f"{packaged.name.removesuffix(f'.{PACKAGED_FORMAT}.gguf')}.{name}.gguf"
        if not files[name].exists():
            # Half a file must not be taken for the whole one later.
            partial = files[name].with_suffix(".partial")
            done = subprocess.run(
                [programs / "llama-quantize", "--allow-requantize", packaged, partial, name],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise PeerError(f"llama-quantize to {name} ended with {done.returncode}: {_last_line(done.stderr)}")
            partial.rename(files[name])
    return files


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
