"""Where the time of one request went.

Boundaries are moments of the router's clock. Inside them, time is split by durations that workers measured with their
own clocks, so no two clocks are ever compared; a duration that does not fit is cut. The six phases sum to the whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """All in seconds and never negative; what each one means is said in inference.proto, `Timings`."""

    tokenize_s: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    handover_s: float
    decode_s: float
    ttft_s: float
    tpot_s: float
    fetch_s: float
    """Part of `queue_s`."""
    recovery_s: float = 0.0
    """From the failure of an attempt to the next token: part of `queue_s` and `prefill_s` before the first token, and
    of `decode_s` after it."""

    @property
    def e2e_s(self) -> float:
        """Sum of the six phases, in their order."""
        return self.tokenize_s + self.queue_s + self.prefill_s + self.transfer_s + self.handover_s + self.decode_s


class Timeline:
    """Collects the moments of one request. Times are `time.monotonic()` in seconds."""

    __slots__ = (
        "_failed_at",
        "_fetch_s",
        "_first_at",
        "_first_step_s",
        "_last_at",
        "_num_tokens",
        "_prefill_s",
        "_prefilling_since",
        "_received_at",
        "_recovery_s",
        "_second_at",
        "_tokenized_at",
        "_transfer_s",
    )

    def __init__(self, received_at: float) -> None:
        self._received_at = received_at
        self._tokenized_at = received_at
        self._first_at: float | None = None
        self._second_at: float | None = None
        self._last_at: float | None = None
        self._num_tokens = 0
        self._prefill_s = 0.0
        self._fetch_s = 0.0
        self._transfer_s = 0.0
        self._first_step_s = 0.0
        self._prefilling_since: float | None = None
        self._failed_at: float | None = None
        self._recovery_s = 0.0

    def tokenized(self, now: float) -> None:
        """The prompt is tokenized and checked."""
        self._tokenized_at = now

    def tokens(self, num_new: int, now: float) -> float:
        """`num_new` tokens have become part of the output: so long after the ones before, or after the request."""
        before = self._received_at if self._last_at is None else self._last_at
        if not num_new:
            return now - before
        if self._failed_at is not None:
            self._recovery_s += now - self._failed_at
            self._failed_at = None
        if self._second_at is None:
            if self._first_at is not None or num_new > 1:
                self._second_at = now
            if self._first_at is None:
                self._first_at = now
        self._num_tokens += num_new
        self._last_at = now
        return now - before

    def prefill_started(self, now: float) -> None:
        """A worker computes the prompt."""
        self._prefilling_since = now

    def attempt_failed(self, now: float) -> None:
        """Another one follows."""
        self._prefilling_since = None
        if self._failed_at is None:
            self._failed_at = now

    def prefilled(self, prefill_s: float, fetch_s: float = 0.0) -> None:
        """What the prefill worker measured for the first token of the output (not for that of a later attempt), and for
        waiting before that for KV from another worker."""
        self._prefill_s = prefill_s
        self._fetch_s = fetch_s

    def transferred(self, transfer_s: float) -> None:
        """What the prefill worker measured from the first token to the last byte in place."""
        self._transfer_s = transfer_s

    def first_step(self, first_step_s: float) -> None:
        """What the decode worker measured for the step that gave the second token."""
        self._first_step_s = first_step_s

    def phases(self, ended_at: float | None = None, *, complete: bool = True) -> Phases:
        """The result at `ended_at`, the end of the request; None: with its last token, of which there must be one.

        What follows the last token is `handover` of an output that is `complete`, since it has waited for the report of
        its hand-off; otherwise the request was in the middle of whatever comes after that token.
        """
        assert ended_at is not None or self._last_at is not None, "no token yet"
        if self._first_at is None or self._last_at is None:
            return self._without_tokens(self._received_at if ended_at is None else ended_at)
        end = self._last_at if ended_at is None else max(ended_at, self._last_at)
        before = self._first_at - self._tokenized_at
        prefill_s = _clamp(self._prefill_s, before)
        after, tail = self._last_at - self._first_at, end - self._last_at
        transfer_s = handover_s = 0.0
        if self._second_at is not None:
            gap = self._second_at - self._first_at
            transfer_s = _clamp(self._transfer_s, gap)
            handover_s = max(0.0, gap - transfer_s - _clamp(self._first_step_s, gap - transfer_s))
        decode_s = max(0.0, after - transfer_s - handover_s)
        if complete or self._second_at is None:
            handover_s += tail
        else:
            decode_s += tail
        return Phases(
            tokenize_s=self._tokenized_at - self._received_at,
            queue_s=before - prefill_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            handover_s=handover_s,
            decode_s=decode_s,
            ttft_s=self._first_at - self._received_at,
            fetch_s=_clamp(self._fetch_s, before - prefill_s),
            tpot_s=after / (self._num_tokens - 1) if self._num_tokens > 1 else 0.0,
            recovery_s=self._recovery_until(end),
        )

    def _without_tokens(self, end: float) -> Phases:
        """Of a request that has ended, or has not come further yet, before its first token."""
        tokenized = self._tokenized_at > self._received_at
        prefill_s = 0.0 if self._prefilling_since is None else max(0.0, end - self._prefilling_since)
        return Phases(
            tokenize_s=self._tokenized_at - self._received_at if tokenized else end - self._received_at,
            queue_s=end - self._tokenized_at - prefill_s if tokenized else 0.0,
            prefill_s=prefill_s if tokenized else 0.0,
            transfer_s=0.0,
            handover_s=0.0,
            decode_s=0.0,
            ttft_s=0.0,
            fetch_s=0.0,
            tpot_s=0.0,
            recovery_s=self._recovery_until(end),
        )

    def _recovery_until(self, end: float) -> float:
        return self._recovery_s + (0.0 if self._failed_at is None else max(0.0, end - self._failed_at))


def _clamp(value: float, longest: float) -> float:
    """`value` cut to [0, longest]; NaN, which a broken peer might send, becomes 0."""
    return min(value, longest) if value > 0.0 else 0.0
