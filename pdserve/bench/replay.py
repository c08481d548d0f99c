"""Recorded requests as requests to this server: texts get tokens, lengths get prompts, both made to fit the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.prompts import PromptMaker
from pdserve.bench.recorded import TRACE_BLOCK_TOKENS, RecordedRequest
from pdserve.bench.requests import PlannedRequest
from pdserve.bench.targets import Target
from pdserve.errors import InvalidRequestError

_BLOCK_NAMES = 1 << 41
"""Names of blocks of traces begin here; beginnings and prompts have smaller ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a record made for large machines is made smaller."""

    length_scale: float = 1.0
    """Input and output lengths are multiplied by this; blocks that prompts share shrink alike."""
    max_input_tokens: int | None = None
    """Longer prompts are cut here; None cuts nothing."""
    max_output_tokens: int | None = None
    default_output_tokens: int = 128
    """Of lines that say nothing of their output."""

    def input_tokens(self, recorded: int) -> int:
        """At least 1."""
        return _fitted(recorded, self.length_scale, self.max_input_tokens)

    def output_tokens(self, recorded: int | None) -> int:
        """At least 1."""
        if recorded is None:
            return self.default_output_tokens
        return _fitted(recorded, self.length_scale, self.max_output_tokens)


def _fitted(recorded: int, scale: float, largest: int | None) -> int:
    scaled = max(round(recorded * scale), 1)
    return scaled if largest is None else min(scaled, largest)


async def planned(
    recorded: Sequence[RecordedRequest], target: Target, maker: PromptMaker, fit: Fit
) -> list[PlannedRequest]:
    """Requests in the order of the record, all due at 0: arrivals are the caller's. Raises InvalidRequestError, and
    what the target's tokenizer raises."""
    if fit.length_scale <= 0:
        raise InvalidRequestError(f"length scale: must be above 0, got {fit.length_scale:g}", field="length_scale")
    requests = []
    for index, record in enumerate(recorded):
        if record.text is not None:
            ids = (await target.tokenize(record.text))[: fit.max_input_tokens]
        elif record.token_ids is not None:
            ids = record.token_ids[: fit.max_input_tokens]
        else:
            assert record.input_tokens is not None
            ids = trace_prompt(maker, index, fit.input_tokens(record.input_tokens), record.hash_ids, fit.length_scale)
        requests.append(
            PlannedRequest(index=index, token_ids=ids, output_tokens=fit.output_tokens(record.output_tokens))
        )
    return requests


def trace_prompt(
    maker: PromptMaker, index: int, num_tokens: int, hash_ids: Sequence[int], length_scale: float = 1.0
) -> tuple[int, ...]:
    """A prompt whose blocks are functions of their numbers: equal numbers give equal tokens, so that a prefix cache
    hits as it did where the trace was taken. Without numbers the prompt is all its own."""
    if not hash_ids:
        return maker.draw(index, num_tokens)
    block = max(round(TRACE_BLOCK_TOKENS * length_scale), 1)
    tokens: list[int] = []
    for number in hash_ids:
        if len(tokens) >= num_tokens:
            break
        tokens += maker.draw(_BLOCK_NAMES + number, block)
    # Rounding may leave the scaled blocks a few tokens short of the scaled length.
    if len(tokens) < num_tokens:
        tokens += maker.draw(index, num_tokens - len(tokens))
    return tuple(tokens[:num_tokens])
