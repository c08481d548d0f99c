"""What clients ask for while processes are struck, and the check that each of them gets exactly that.

The right answers are those of a run that nobody disturbs. Greedy ones are compared with transformers, JSON with its
schema, and each of several outputs with the request that has its seed alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pdserve.client import AsyncClient
from pdserve.errors import PdServeError
from pdserve.testing.reference import check_greedy, greedy_reference

MODES: Final = ("greedy", "seeded", "n=3", "schema")

NUM_COLOURS: Final = 12
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "colours": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": NUM_COLOURS,
            "maxItems": NUM_COLOURS,
        }
    },
    "required": ["colours"],
    "additionalProperties": False,
}

NUM_TOKENS: Final = 160
PROMPT_TOKENS: Final = (20, 120)
LONG_PROMPT_TOKENS: Final = 1400
"""Some prefill chunks, which take long enough to be met."""
MIN_GAP: Final = 1e-3
"""Between the two best logits of the reference: a hundred times what rounding does."""

_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "frequency_penalty": 0.5},
    "n=3": {"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "n": 3},
    "schema": {"temperature": 1.0, "max_tokens": 600, "json_schema": SCHEMA},
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request whose answer is known."""

    mode: str
    options: dict[str, Any]
    outputs: tuple[tuple[int, ...], ...]
    """Token ids of each output."""

    @property
    def num_tokens(self) -> int:
        """Of all outputs."""
        return sum(map(len, self.outputs))


@dataclass(slots=True)
class Received:
    """What one client has seen of one request."""

    ask: Ask
    request_id: str
    began_at: float
    arrivals: list[float] = field(default_factory=list)
    """`time.monotonic()` of each delta."""
    ended_at: float = 0.0
    num_tokens: int = 0
    attempts: int = 0
    error: PdServeError | None = None
    problem: str = ""
    """What is wrong with it, if anything is."""

    @property
    def begun(self) -> bool:
        """Whether it has got something."""
        return bool(self.arrivals)

    @property
    def is_over(self) -> bool:
        """Whether its only end has come."""
        return self.ended_at > 0.0

    def longest_gap_s(self, since: float) -> float:
        """Longest time without news that did not end before `since`; the first token counts as news of the start."""
        moments = [self.began_at, *self.arrivals, self.ended_at]
        return max((b - a for a, b in itertools.pairwise(moments) if b >= since), default=0.0)


async def receive(client: AsyncClient, received: Received) -> None:
    """Read the whole stream, and check all there is to check about it."""
    ask = received.ask
    tokens: list[list[int]] = [[] for _ in ask.outputs]
    ended: set[int] = set()
    next_seq = 0
    try:
        async with client.stream(**ask.options, request_id=received.request_id) as stream:
            async for delta in stream:
                received.arrivals.append(time.monotonic())
                mine = tokens[delta.index]
                mine += delta.token_ids
                received.num_tokens += len(delta.token_ids)
                wrong = {
                    f"delta {delta.seq} where {next_seq} was to come": delta.seq != next_seq,
                    f"output {delta.index} goes on after its end": delta.index in ended,
                    f"output {delta.index} has {len(mine)} tokens, not {delta.num_tokens}": len(mine)
                    != delta.num_tokens,
                    f"output {delta.index} differs": tuple(mine) != ask.outputs[delta.index][: len(mine)],
                }
                received.problem = received.problem or "; ".join(what for what, is_so in wrong.items() if is_so)
                next_seq += 1
                if delta.finish_reason is not None:
                    ended.add(delta.index)
            result = await stream.result()
    except PdServeError as error:
        received.error = error
        received.problem = received.problem or f"{error.code}: {error.message}"
    else:
        received.attempts = result.placement.attempts
        if not received.problem and tuple(o.token_ids for o in result.outputs) != ask.outputs:
            received.problem = "the result differs"
        if not received.problem and ended != set(range(len(ask.outputs))):
            received.problem = f"only outputs {sorted(ended)} have an end"
    received.ended_at = time.monotonic()


class Asks:
    """Requests of every mode, with their answers."""

    def __init__(self, model: Path, seed: int, num_per_mode: int) -> None:
        """Make them up; `learn` gets the answers."""
        torch.set_num_threads(1)
        self._model = model
        self._rng = np.random.default_rng(seed)
        self._num = num_per_mode
        self._by_mode: dict[str, list[Ask]] = {}
        self._long: dict[str, list[Ask]] = {}

    def some(self, mode: str) -> Sequence[Ask]:
        """Of short prompts."""
        return self._by_mode[mode]

    def long(self, mode: str) -> Sequence[Ask]:
        """Of long prompts."""
        return self._long[mode]

    async def learn(self, client: AsyncClient) -> None:
        """Have everything answered once, undisturbed, and compare it with independent references."""
        reference: Any = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
        reference.eval()
        prompts = {mode: self._prompts(reference, mode) for mode in MODES}
        learned = await asyncio.gather(
            *(self._answered(client, mode, prompt) for mode, some in prompts.items() for prompt in some)
        )
        for ask in learned:
            place = self._long if len(ask.options["token_ids"]) == LONG_PROMPT_TOKENS else self._by_mode
            place.setdefault(ask.mode, []).append(ask)
        greedy = [ask for ask in learned if ask.mode == "greedy"]
        checks = check_greedy(reference, [a.options["token_ids"] for a in greedy], [a.outputs[0] for a in greedy])
        assert [check.wrong_step for check in checks] == [None] * len(checks)

    def _prompts(self, reference: Any, mode: str) -> list[list[int]]:
        """The last one is long. Of greedy requests only those whose answer has no near tie."""
        lengths = self._rng.integers(*PROMPT_TOKENS, 2 * self._num + 4)
        prompts: list[list[int]] = [self._rng.integers(3, 300, int(n)).tolist() for n in lengths]
        long: list[int] = self._rng.integers(3, 300, LONG_PROMPT_TOKENS).tolist()
        if mode == "greedy":
            outputs = greedy_reference(reference, prompts, NUM_TOKENS)
            prompts = [p for p, o in zip(prompts, outputs, strict=True) if o.min_gap >= MIN_GAP]
            assert len(prompts) >= self._num, "too few prompts without a near tie"
        return [*prompts[: self._num], long]

    async def _answered(self, client: AsyncClient, mode: str, prompt: list[int]) -> Ask:
        options = _OPTIONS[mode] | {"token_ids": prompt}
        if mode != "greedy":
            options["seed"] = int(self._rng.integers(2**63))
        elif len(prompt) == LONG_PROMPT_TOKENS:
            # A long output may have a tie; a short one has none as a rule.
            options["max_tokens"] = NUM_TOKENS // 4
        result = await client.generate(**options)
        if mode == "n=3":
            for index, output in enumerate(result.outputs):
                alone = await client.generate(**options | {"n": 1, "seed": options["seed"] + index})
                assert alone.token_ids == output.token_ids
        elif mode == "schema":
            value = json.loads(result.text)
            assert list(value) == ["colours"]
            assert len(value["colours"]) == NUM_COLOURS
            assert set(value["colours"]) <= {"red", "green", "blue"}
        return Ask(mode, options, tuple(output.token_ids for output in result.outputs))
