"""What happens to requests, as it happens. A token costs one search in a short list and two additions here."""

from __future__ import annotations

import enum

from pdserve.errors import CancelledError, PdServeError
from pdserve.metrics import Values
from pdserve.metrics import router_table as table
from pdserve.metrics import vllm_table as vllm
from router.placement import Estimate
from router.stream import Summary
from router.timeline import Phases


class TakeoverOutcome(enum.StrEnum):
    """What has become of a request whose router is gone."""

    TAKEN = "taken"
    """It goes on here."""
    RACED = "raced"
    """Another router was quicker."""
    EXPIRED = "expired"
    """Its record had gone when it was to be taken."""
    REFUSED = "refused"
    """It is not accepted here, or cannot be read."""
    FAILED = "failed"
    """Redis did not answer."""
    LOST = "lost"
    """One of this router's, which has taken it for gone: another router goes on with it."""


class RouterMetrics:
    """Told by requests. Everything returns at once and raises nothing."""

    def __init__(self, model: str, *, vllm_names: bool) -> None:
        """`model` is the name under which clients know it. `vllm_names`: see `pdserve/metrics/vllm_table.py`."""
        self.model = model
        self.vllm_names = vllm_names
        self.values = values = Values((*table.ROUTER_METRICS, *(vllm.VLLM_METRICS if vllm_names else ())))
        self._ttft = values.distribution(table.TTFT)
        self._itl = values.distribution(table.ITL)
        self._tpot = values.distribution(table.TPOT)
        self._e2e = values.distribution(table.E2E)
        self._prompt_length = values.distribution(table.PROMPT_LENGTH)
        self._output_length = values.distribution(table.OUTPUT_LENGTH)
        self._migration_stop = values.distribution(table.MIGRATION_STOP)
        self._prediction = values.distribution(table.PREDICTION_RATIO)
        self._phases = {
            phase: values.distribution(table.PHASES, phase)
            for phase in ("tokenize", "queue", "fetch", "prefill", "transfer", "handover", "decode")
        }
        self.num_output_tokens = 0
        # There from the start: otherwise the first scrape would make a series.
        self.values.add(table.HTTP_RESPONSES, "200", by=0)
        for outcome in TakeoverOutcome:
            self.values.add(table.TAKEOVERS, outcome.value, by=0)
        if vllm_names:
            self._share()

    def _share(self) -> None:
        shared = {
            vllm.VLLM_TTFT: self._ttft,
            vllm.VLLM_ITL: self._itl,
            vllm.VLLM_TPOT: self._tpot,
            vllm.VLLM_E2E: self._e2e,
            vllm.VLLM_QUEUE: self._phases["queue"],
            vllm.VLLM_PREFILL: self._phases["prefill"],
            vllm.VLLM_DECODE: self._phases["decode"],
            vllm.VLLM_PROMPT_LENGTH: self._prompt_length,
            vllm.VLLM_OUTPUT_LENGTH: self._output_length,
        }
        for metric, distribution in shared.items():
            self.values.share(metric, self.model, of=distribution)

    def rejected(self, error: PdServeError) -> None:
        """A call was refused before there was a request."""
        self.values.add(table.REJECTIONS, _reason(error))

    def dispatched(self, *, local: bool) -> None:
        """An attempt was sent to workers. `local`: the decode worker computes the prompt."""
        self.values.add(table.ATTEMPTS, "local" if local else "remote")

    def prompt_computed(
        self, *, num_tokens: int, num_cached: int, num_fetched: int, estimate: Estimate, took_s: float
    ) -> None:
        """The prompt of one or several outputs has been computed for the first time, `took_s` after its dispatch."""
        self._prompt_length.add(num_tokens)
        self.values.add(table.PROMPT_TOKENS, by=num_tokens)
        self.values.add(table.CACHED_TOKENS, by=num_cached)
        self.values.add(table.FETCHED_TOKENS, by=num_fetched)
        self.values.add(table.PREDICTED_CACHED_TOKENS, by=estimate.num_cached_tokens)
        if estimate.ttft_s > 0.0:
            self._prediction.add(took_s / estimate.ttft_s)

    def tokens(self, num_new: int, waited_s: float, *, first: bool) -> None:
        """Tokens of one output have come, `waited_s` after those before or, if they are the `first`, after the
        request."""
        if num_new:
            self.num_output_tokens += num_new
            (self._ttft if first else self._itl).add(waited_s)

    def handed_off(self, transport: str, nbytes: int, *, leads: bool) -> None:
        """KV is with a decode worker: of the output that `leads`, and of others that have the same prompt."""
        if leads:
            self.values.add(table.HANDOFFS, transport)
        self.values.add(table.TRANSFER_BYTES, transport, by=nbytes)

    def migration_ended(self, cause: str, outcome: str) -> None:
        """A stream that was to move has done so, or not."""
        self.values.add(table.MIGRATIONS, cause, outcome)

    def migrated(self, transport: str, nbytes: int, stop_s: float) -> None:
        """What it took."""
        self.values.add(table.MIGRATION_BYTES, transport, by=nbytes)
        self._migration_stop.add(stop_s)

    def retried(self, cause: PdServeError) -> None:
        """An attempt has failed because of `cause`, and there will be another."""
        self.values.add(table.RETRIES, cause.code)

    def not_retried(self, cause: PdServeError) -> None:
        """An attempt has failed because of `cause`, and there is no budget for another."""
        self.values.add(table.RETRIES_REFUSED, cause.code)

    def took_over(self, outcome: TakeoverOutcome) -> None:
        """A request whose router is gone was to go on here, or one of this router's goes on elsewhere. Once for all of
        its outputs."""
        self.values.add(table.TAKEOVERS, outcome.value)

    def finished(self, summary: Summary, recovered_from: PdServeError | None) -> None:
        """An output is complete; `recovered_from` is what its last failed attempt, if any, ended with."""
        self.values.add(table.REQUESTS, "finished", summary.ending.reason.value)
        if recovered_from is not None:
            self.values.add(table.RECOVERIES, recovered_from.code)
        phases = summary.phases
        self._output_length.add(summary.num_output_tokens)
        self._e2e.add(phases.e2e_s)
        if summary.num_output_tokens > 1:
            self._tpot.add(phases.tpot_s)
        self._observe_phases(phases)

    def answered(self, status: int) -> None:
        """A call over HTTP gets an answer."""
        self.values.add(table.HTTP_RESPONSES, str(status))

    def judged(self, kind: str, *, ttft_met: bool, tpot_met: bool) -> None:
        """An output of that priority class has finished, in time or not."""
        missed = "met" if ttft_met and tpot_met else "tpot" if ttft_met else "ttft" if tpot_met else "both"
        self.values.add(table.SLO, kind, missed)

    def judged_failed(self, kind: str) -> None:
        """An output of that priority class has failed."""
        self.values.add(table.SLO, kind, "failed")

    def failed(self, error: PdServeError) -> None:
        """An output was cancelled or could not be completed."""
        outcome = "cancelled" if isinstance(error, CancelledError) else "failed"
        self.values.add(table.REQUESTS, outcome, _reason(error))

    def _observe_phases(self, phases: Phases) -> None:
        by_name = self._phases
        by_name["tokenize"].add(phases.tokenize_s)
        by_name["queue"].add(phases.queue_s)
        by_name["fetch"].add(phases.fetch_s)
        by_name["prefill"].add(phases.prefill_s)
        by_name["transfer"].add(phases.transfer_s)
        by_name["handover"].add(phases.handover_s)
        by_name["decode"].add(phases.decode_s)


def _reason(error: PdServeError) -> str:
    """The code, or what says more: why admission refused a request, or that the client has left. Never anything of a
    client's making."""
    return error.details.get("reason", error.code)
