"""Drafts of a second model. There is one real model here, so it drafts for itself.

That says whether every token is right and what drafting costs. What a small model gains cannot be seen: here each
draft token costs a whole step, and saves no more than what the worker does between two steps. So the figure with a bar
is that of `auto`, which has to find out what is faster.
"""

from __future__ import annotations

import statistics

from benchmarks.harness.report import Report
from benchmarks.speculation.servers import MODEL, Answer, Servers, Variants, read_prompts

VARIANTS: Variants = {
    "off": {"method": "off"},
    "draft": {"method": "draft", "draft_model": MODEL, "max_draft_tokens": 4},
    "auto": {"method": "auto", "draft_model": MODEL},
}
BAR = ">= 0.97"
NUM_TOKENS = 96
OPEN = "open"


def run(report: Report, *, threads: int, quick: bool) -> None:
    """Open questions, greedy, at batch 1; every server in turns."""
    prompts = [prompt for prompt in read_prompts() if prompt.kind == OPEN][: 1 if quick else 3]
    answers: dict[str, list[Answer]] = {name: [] for name in VARIANTS}
    num_different = 0
    with Servers(threads=threads, variants=VARIANTS) as servers:
        for name in VARIANTS:
            servers.ask(name, prompts[0], 32)
        for number in range(1 if quick else 3):
            for prompt in prompts:
                outputs = set[tuple[int, ...]]()
                for name in list(VARIANTS)[:: -1 if number % 2 else 1]:
                    answer = servers.ask(name, prompt, NUM_TOKENS)
                    answers[name].append(answer)
                    outputs.add(answer.token_ids)
                num_different += len(outputs) - 1
    rates = {name: statistics.median(a.tokens_per_s for a in found) for name, found in answers.items()}
    report.samples["draft"] = {
        name: [
            {"tokens_per_s": round(a.tokens_per_s, 1), "accepted": a.num_accepted, "rejected": a.num_rejected}
            for a in found
        ]
        for name, found in answers.items()
    }
    drafted = answers["draft"]
    num_accepted, num_rejected = sum(a.num_accepted for a in drafted), sum(a.num_rejected for a in drafted)
    report.add(
        "draft_self_accepted", num_accepted / max(1, num_accepted + num_rejected), "ratio",
        note=f"{statistics.median(a.tokens_per_step for a in drafted):.2f} tokens a step of the model",
    )  # fmt: skip
    report.add(
        "draft_self_over_plain", rates["draft"] / rates["off"], "ratio",
        note="drafts always, each token by a whole step of the model itself: what it costs, not what it is for",
    )  # fmt: skip
    report.add(
        "draft_auto_over_plain", rates["auto"] / rates["off"], "ratio", bar=BAR,
        note="drafts by the model, by look-up or not at all, as it finds to be faster",
    )  # fmt: skip
    report.add("draft_different_outputs", float(num_different), "outputs", bar="<= 0", note="answers that differ")
