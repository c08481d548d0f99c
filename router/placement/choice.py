"""What placement answers: where an attempt goes, and what is expected of it there."""

from __future__ import annotations

from dataclasses import dataclass

from router.placement.view import WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What an attempt is expected to take, at the moment of the decision. Times are seconds."""

    num_tokens: int
    """Tokens of the prompt, and of the output of earlier attempts."""
    num_cached_tokens: int
    """Those that whoever computes the prompt has got already."""
    queue_s: float
    """Waiting for others."""
    fetch_s: float
    """Getting KV from another worker instead of computing it."""
    prefill_s: float
    """Computing the rest."""
    handover_s: float
    """Moving KV to the decode worker after the first token; 0 if that has computed the prompt itself."""
    decode_s: float
    """The first steps of the decode worker with the request in its batch; see Steps."""
    other_ttft_s: float | None
    """Time to first token the other way: remote if it is local, and local if it is remote. None: not possible now."""

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens to compute."""
        return self.num_tokens - self.num_cached_tokens

    @property
    def ttft_s(self) -> float:
        """From dispatch to the first token, which does not wait for the hand-over."""
        return self.queue_s + self.fetch_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Choice:
    """Where an attempt goes."""

    prefill: WorkerKey | None
    """None: the decode worker computes the prompt."""
    decode: tuple[WorkerKey, ...]
    """Best first, at least one; exactly one if it computes the prompt."""
    estimate: Estimate
    holders: tuple[tuple[WorkerKey, int], ...] = ()
    """From whom the prefill worker may fetch KV that it has not got, and of how many of the first tokens they have it;
    the longest first."""

    @property
    def local(self) -> bool:
        """Whether the decode worker computes the prompt."""
        return self.prefill is None
