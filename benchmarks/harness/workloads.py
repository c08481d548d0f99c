"""What is timed: the same pieces of work for our engine and for every peer. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """`steps` decode steps of `batch` sequences, the first of them with `context` tokens before it."""

    batch: int
    context: int
    steps: int

    @property
    def name(self) -> str:
        """Short and unique, for tables and figures."""
        return f"decode_b{self.batch}_ctx{self.context}"

    @property
    def num_tokens(self) -> int:
        """Tokens that come out."""
        return self.batch * self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One prompt of `tokens` tokens, alone, with the logits of its last token."""

    tokens: int

    @property
    def name(self) -> str:
        """Short and unique, for tables and figures."""
        return f"prefill_{self.tokens}"

    @property
    def num_tokens(self) -> int:
        """Tokens that go in."""
        return self.tokens


Workload = Decode | Prefill

Samples = dict[Workload, list[float]]
"""Tokens per second, one entry for each time that a workload was run."""


class Contestant(Protocol):
    """An engine with one set of weights."""

    @property
    def name(self) -> str:
        """Engine and format, such as `llama.cpp Q4_0`."""

    def prepare(self) -> None:
        """Start what `measure` needs, if it does not run. Raises PeerError if the engine fails."""

    def measure(self, workloads: Sequence[Workload]) -> Samples:
        """Run each workload at least once. Raises PeerError if the engine fails."""

    def close(self) -> None:
        """End its processes and free its memory."""


class PeerError(Exception):
    """A peer is not there, or did not do what it was asked to; the message says which and why."""
