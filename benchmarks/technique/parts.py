"""Every part of the benchmark, by name: one line for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.harness.report import Report
from benchmarks.speculation import draft_model, prompts
from benchmarks.technique import int8_kv, long_context, perplexity, tensor_parallel, window


@dataclass(frozen=True, slots=True)
class Context:
    """What every part is given."""

    report: Report
    """Takes figures and samples."""
    threads: int
    """Of each engine."""
    quick: bool
    """Whether to do as little as shows that it works."""


PARTS: Final[Mapping[str, Callable[[Context], None]]] = {
    "copying": lambda c: prompts.run("copying", c.report, threads=c.threads, quick=c.quick),
    "open": lambda c: prompts.run("open", c.report, threads=c.threads, quick=c.quick),
    "sampled": lambda c: prompts.run("sampled", c.report, threads=c.threads, quick=c.quick),
    "draft": lambda c: draft_model.run(c.report, threads=c.threads, quick=c.quick),
    "long": lambda c: long_context.run(c.report, threads=c.threads, quick=c.quick),
    "int8_kv": lambda c: int8_kv.run(c.report, threads=c.threads, quick=c.quick),
    "perplexity": lambda c: perplexity.run(c.report, threads=c.threads, quick=c.quick),
    "window": lambda c: window.run(c.report, threads=c.threads, quick=c.quick),
    "tensor_parallel": lambda c: tensor_parallel.run(c.report, threads=c.threads, quick=c.quick),
}
