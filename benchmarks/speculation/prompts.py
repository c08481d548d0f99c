"""Drafts that are looked up: answers to prompts of four kinds, with them and without."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.harness.report import Report
from benchmarks.speculation.servers import METHODS, Answer, Prompt, Servers, read_prompts

COPYING_KINDS = ("rewrite", "code edit", "extract")
COPYING_BAR, OPEN_BAR = ">= 1.35", ">= 0.97"
NUM_TOKENS = 96
TEMPERATURE = 0.7

Answers = dict[Prompt, dict[str, list[Answer]]]


class Benchmark:
    """One run: what it measures is appended to `report`."""

    def __init__(self, report: Report, servers: Servers, *, quick: bool) -> None:
        self._report = report
        self._servers = servers
        self._rounds = 1 if quick else 4
        prompts = read_prompts()
        self._prompts = [prompts[0], prompts[-1]] if quick else prompts

    def run(self, part: str) -> None:
        """Run one of the parts."""
        for method in METHODS:
            # Steps at batch 1 are measured, and what the first request of a process has to wait for is over.
            self._servers.ask(method, self._prompts[-1], 32)
        prompts = [p for p in self._prompts if part == "sampled" or (p.kind in COPYING_KINDS) == (part == "copying")]
        self._add(part, self._ask_all(prompts, TEMPERATURE if part == "sampled" else 0.0))

    def _ask_all(self, prompts: Sequence[Prompt], temperature: float) -> Answers:
        """Both servers in turns, each first in every second round."""
        answers: Answers = {prompt: defaultdict(list) for prompt in prompts}
        for number in range(self._rounds):
            for prompt in prompts:
                for method in METHODS[:: -1 if number % 2 else 1]:
                    answer = self._servers.ask(method, prompt, NUM_TOKENS, temperature=temperature)
                    answers[prompt][method].append(answer)
        return answers

    def _add(self, part: str, answers: Answers) -> None:
        ratios, rows = defaultdict(list), []
        num_outputs = 0
        for prompt, by_method in answers.items():
            outputs = {answer.token_ids for found in by_method.values() for answer in found}
            num_outputs += len(outputs)
            plain, drafted = (_median([a.tokens_per_s for a in by_method[method]]) for method in METHODS)
            ratios[prompt.kind].append(drafted / plain)
            rows.append(
                {
                    "kind": prompt.kind,
                    "source": prompt.source,
                    "num_tokens": len(by_method["auto"][0].token_ids),
                    "ratio": round(drafted / plain, 3),
                    "tokens_per_step": round(_median([a.tokens_per_step for a in by_method["auto"]]), 3),
                    "accepted": [a.num_accepted for a in by_method["auto"]],
                    "rejected": [a.num_rejected for a in by_method["auto"]],
                    "tokens_per_s": {m: [round(a.tokens_per_s, 1) for a in by_method[m]] for m in METHODS},
                }
            )
        self._report.samples[part] = rows
        prefix, is_greedy = "ngram_sampled" if part == "sampled" else "ngram", part != "sampled"
        for kind, values in ratios.items():
            of_kind = [row for row in rows if row["kind"] == kind]
            steps = ", ".join(f"{row['tokens_per_step']:.2f}" for row in of_kind)
            is_open = kind not in COPYING_KINDS
            self._report.add(
                f"{prefix}_{kind.replace(' ', '_')}_over_plain", statistics.mean(values), "ratio",
                bar=OPEN_BAR if is_open and is_greedy else None, note=f"tokens a step by prompt: {steps}",
            )  # fmt: skip
        copying = [value for kind in COPYING_KINDS for value in ratios[kind]]
        if copying:
            self._report.add(
                f"{prefix}_copying_over_plain", statistics.mean(copying), "ratio",
                bar=COPYING_BAR if is_greedy else None,
                note=f"mean of {len(copying)} prompts, from {min(copying):.2f} to {max(copying):.2f}",
            )  # fmt: skip
        self._report.add(
            f"ngram_{part}_different_outputs", float(num_outputs - len(answers)), "outputs", bar="<= 0",
            note="answers that differ from that without drafts",
        )  # fmt: skip


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def run(part: str, report: Report, *, threads: int, quick: bool) -> None:
    """Measure one of `copying`, `open` and `sampled`."""
    with Servers(threads=threads) as servers:
        Benchmark(report, servers, quick=quick).run(part)
