"""Servers that differ in `decode.speculation` alone, and answers of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pdserve.client import Client
from pdserve.config import load_config
from pdserve.launch.cluster import LocalCluster

Variants = Mapping[str, Mapping[str, object]]
"""Settings of `decode.speculation`, by name of the server."""

MODEL = "smollm2-135m-instruct"
PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "speculation.jsonl"
METHODS = ("off", "auto")
LOOK_UP: Variants = {method: {"method": method} for method in METHODS}
"""Without drafts, and with those that are looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question."""

    kind: str
    source: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of it."""

    token_ids: tuple[int, ...]
    tokens_per_s: float
    """After the first token."""
    num_accepted: int
    num_rejected: int

    @property
    def tokens_per_step(self) -> float:
        """Of those after the first token, which no decode step draws."""
        num_decoded = len(self.token_ids) - 1
        return num_decoded / (num_decoded - self.num_accepted)


def read_prompts() -> list[Prompt]:
    """All of them, in order."""
    rows = map(json.loads, PROMPTS.read_text().splitlines())
    return [Prompt(kind=row["kind"], source=row["source"], text=row["prompt"]) for row in rows]


class Servers:
    """A router and one decode worker, which also computes the prompts, for each variant. One server works at a time."""

    def __init__(self, *, threads: int, variants: Variants = LOOK_UP) -> None:
        """`threads` of each engine."""
        self._threads = threads
        self._variants = variants
        self._clients: dict[str, Client] = {}
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            for name, speculation in self._variants.items():
                overrides = {
                    "model.path": MODEL,
                    "cluster": f"speculation-{name}",
                    "engine.kind": "cpu",
                    "engine.threads": self._threads,
                    "kv.num_blocks": 256,
                    "local.prefill_workers": 0,
                    "router.listen": "127.0.0.1:0",
                    **{f"decode.speculation.{key}": value for key, value in speculation.items()},
                }
                cluster = exits.enter_context(LocalCluster(load_config(environ={}, overrides=overrides)))
                self._clients[name] = exits.enter_context(Client(cluster.address))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.close()

    def ask(self, name: str, prompt: Prompt, num_tokens: int, *, temperature: float = 0.0) -> Answer:
        """Let the server of this name answer `prompt`, alone, with as many tokens as it takes, at most `num_tokens`."""
        answer = self._clients[name].generate(
            messages=[{"role": "user", "content": prompt.text}],
            max_tokens=num_tokens,
            temperature=temperature,
            seed=1,
            timeout_s=60.0,
        )
        return Answer(
            token_ids=tuple(answer.token_ids),
            tokens_per_s=1e3 / answer.timings.tpot_ms if answer.timings.tpot_ms else 0.0,
            num_accepted=answer.usage.accepted_draft_tokens,
            num_rejected=answer.usage.rejected_draft_tokens,
        )
