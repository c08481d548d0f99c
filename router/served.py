"""Who has served a request and what that took, as far as it is known: for whoever asks, and for the last word on it."""

from __future__ import annotations

from dataclasses import dataclass

from router.events import FirstToken, HandedOff, StepTokens
from router.output import Ending
from router.placement import Estimate
from router.stream import Summary
from router.timeline import Phases


@dataclass(slots=True, kw_only=True)
class Served:
    """Workers are those of the current attempt; what was measured is of the attempt that sent the first token."""

    prefill_worker: str = ""
    decode_worker: str = ""
    transport: str = ""
    kv_bytes: int = 0
    """Of all attempts."""
    num_cached_tokens: int = 0
    num_fetched_tokens: int = 0
    num_local_prefill_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    estimate: Estimate | None = None

    def prompt_computed(self, event: FirstToken, estimate: Estimate, num_prompt_tokens: int) -> None:
        """The first token of the output is there, of an attempt that was expected to take `estimate`."""
        self.estimate = estimate
        self.num_cached_tokens = min(event.num_cached_tokens, num_prompt_tokens)
        self.num_fetched_tokens = min(event.num_fetched_tokens, self.num_cached_tokens)

    def computed_by_decode(self, num_tokens: int) -> None:
        """So many tokens, by its latest word, which may repeat an earlier one."""
        self.num_local_prefill_tokens = max(self.num_local_prefill_tokens, num_tokens)

    def drafted(self, event: StepTokens) -> None:
        """What became of the tokens that a decode worker had drafted for one step."""
        self.num_accepted_drafts += event.num_accepted
        self.num_rejected_drafts += event.num_rejected

    def handed_off(self, event: HandedOff) -> None:
        """The decode worker has the KV."""
        self.transport = event.transport
        self.kv_bytes += event.kv_bytes

    def summary(
        self,
        ending: Ending,
        phases: Phases,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        num_attempts: int,
        num_migrations: int,
    ) -> Summary:
        """The output is complete."""
        return Summary(
            ending=ending,
            phases=phases,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_fetched_tokens=self.num_fetched_tokens,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            transport=self.transport,
            kv_bytes=self.kv_bytes,
            num_attempts=num_attempts,
            num_migrations=num_migrations,
            num_local_prefill_tokens=self.num_local_prefill_tokens,
            # Of tokens behind a stop string nobody hears.
            num_accepted_drafts=min(self.num_accepted_drafts, num_output_tokens),
            num_rejected_drafts=self.num_rejected_drafts,
            estimate=self.estimate,
        )
