"""What is asked, and what became of it. Times are seconds since the run began, by the client's monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

PHASES = ("late", "tokenize", "queue", "prefill", "transfer", "handover", "decode", "outside")
"""Parts of a request's latency, in order. `late`: the client sent it after it was due. `outside`: network, client
and the server's edge, i.e. what the client saw and the server did not account for. The rest is the server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a workload."""

    index: int
    token_ids: tuple[int, ...]
    """The prompt, in the served model's tokens."""
    output_tokens: int
    """Forced: end-of-sequence is ignored."""
    arrival_s: float = 0.0
    """When it is due in an open loop."""
    group: str = "all"
    """Requests of one kind, which experiments report apart."""
    warmup: bool = False
    """Runs like the others and is left out of the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server says at the end of an answer. What it does not say is None or empty."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    """The six phases of pdserve, by its router's clock."""
    prefill_worker: str = ""
    decode_worker: str = ""
    local_prefill: bool = False


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What the client saw of one request."""

    request: PlannedRequest
    due_s: float
    """When it should have been sent. In a closed loop that is when it was."""
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    """One for each output token. Tokens of one message have the same time."""
    ended_s: float = 0.0
    error: str | None = None
    """Code of the failure; None if all tokens came."""
    error_message: str = ""
    answer: Answer = Answer()

    @property
    def ttft_s(self) -> float | None:
        """From when the request was due to its first token; None if there was none."""
        return self.token_times_s[0] - self.due_s if self.token_times_s else None

    @property
    def e2e_s(self) -> float:
        """From when the request was due to the end of its answer."""
        return self.ended_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies, one fewer than tokens."""
        times = self.token_times_s
        return [after - before for before, after in pairwise(times)]

    @property
    def phases_s(self) -> dict[str, float]:
        """`PHASES` in seconds, which sum to `e2e_s`; empty if the server told none.

        Clocks of two machines are never compared: of the server there are durations only. `outside` can come out
        slightly negative where the server's end of a request is later than the client's.
        """
        if not self.answer.phases_ms:
            return {}
        late = self.sent_s - self.due_s
        server = {name: ms / 1e3 for name, ms in self.answer.phases_ms.items()}
        return {"late": late, **server, "outside": self.e2e_s - late - sum(server.values())}
