"""What a worker's work costs, learned from what it reports of the requests on it.

What is measured goes into the models of `router.cost`; here is what it has to be measured in, and what of it counts.
"""

from __future__ import annotations

import math
from typing import Final

from pdserve.kv_layout import DTYPE_NBYTES
from pdserve.types import Role
from pdserve.worker_info import WorkerInfo
from router.cost import OnlineFit, Peers, PrefillModel, Shares, Standing, StepModel, TransferModel
from router.events import FirstToken, HandedOff, StepTokens
from router.placement import SharedView, WorkerView

ODDS_MEMORY: Final = 0.2
"""Weight of the newest prompt in the odds of a fetch."""
OVERHEAD_S: Final = 2e-3
"""Before it is measured."""
LEAST_OVERHEAD_S: Final = 1e-5
"""Two clocks have measured its parts."""
LEAST_TRANSFER_S: Final = 1e-4
"""What is less, or was hidden by the compute altogether, is taken for this."""
LEAST_PART: Final = 0.1
"""Of what was measured for a prompt that was computed beside steps of others: it has taken at least so much itself."""


class CostModels:
    """Of one worker, or of several together (`mixed`)."""

    def __init__(self, *, mixed: bool) -> None:
        self.prefill = PrefillModel(mixed=mixed)
        self.handover = TransferModel()
        """To decode workers."""
        self.fetch = TransferModel()
        """From other workers' caches."""
        self.step = StepModel(mixed=mixed)


class SharedCosts(CostModels):
    """Of all workers that a router knows."""

    def __init__(self) -> None:
        super().__init__(mixed=True)
        self.num_changes = 0
        """Grows with whatever is learned."""
        self.prefill_peers = {role: Peers(PrefillModel(mixed=True)) for role in Role}
        self.shares = {role: Shares() for role in Role}
        # Only workers of one role do these.
        self.handover_peers = Peers(self.handover)
        self.fetch_peers = Peers(self.fetch)
        self.step_peers = Peers(self.step)
        self.overhead = {role: OnlineFit((OVERHEAD_S,), mixed=True) for role in Role}
        """What a prompt with nobody in front takes beside fetch and compute: messages, the reservation at the decode
        worker, event loops. It varies more from one time to the next than from one worker to the other."""

    @property
    def view(self) -> SharedView:
        """What placement sees of them."""
        return SharedView(
            prefill=self.prefill.coefficients,
            step=self.step.coefficients,
            handover=self.handover.coefficients,
            fetch=self.fetch.coefficients,
            prefill_overhead_s=self.overhead[Role.PREFILL].predict((1.0,)),
            decode_overhead_s=self.overhead[Role.DECODE].predict((1.0,)),
        )


class WorkerCosts(CostModels):
    """Of one worker. Until enough was measured on it, it is thought to be like the others: one that is thought to be
    slow, because its first prompts were, would not be measured again. The same when that was long ago; see Standing."""

    def __init__(self, info: WorkerInfo, others: SharedCosts) -> None:
        """`others` are the models of all workers together, this one included; they are fed here, too."""
        super().__init__(mixed=False)
        self._others = others
        self._role = info.role
        self._prefill = Standing(self.prefill, others.prefill_peers[info.role])
        self._handover = Standing(self.handover, others.handover_peers)
        self._fetch = Standing(self.fetch, others.fetch_peers)
        self._step = Standing(self.step, others.step_peers)
        self.fetch_odds = 1.0
        """Part of the fetches expected of it that it has made."""
        # Of a token.
        self.fetch_nbytes = info.kv_layout.block_nbytes / info.kv_layout.block_size
        is_exact = info.role is Role.DECODE or info.codecs[0] == "none"
        # Other codecs send a byte per value.
        self.handover_nbytes = self.fetch_nbytes / (1 if is_exact else DTYPE_NBYTES[info.kv_layout.dtype])
        self._last_step_s = 0.0

    @property
    def shares(self) -> Shares:
        """Of the work that its role has had."""
        return self._others.shares[self._role]

    @property
    def known_prefill(self) -> PrefillModel | None:
        """Its own model, once it is one."""
        return self._prefill.known

    @property
    def known_step(self) -> StepModel | None:
        """Its own model, once it is one."""
        return self._step.known

    # What is believed of it: coefficients of its models, or None if it is thought to be like the others.

    @property
    def believed_prefill(self) -> tuple[float, float, float] | None:
        """Of its PrefillModel."""
        return _scaled(self._prefill) if self._prefill.known else None

    @property
    def believed_step(self) -> tuple[float, float, float] | None:
        """Of its StepModel."""
        return _scaled(self._step) if self._step.known else None

    @property
    def believed_handover(self) -> tuple[float, float] | None:
        """Of its TransferModel to decode workers."""
        return _scaled_pair(self._handover) if self._handover.known else None

    @property
    def believed_fetch(self) -> tuple[float, float] | None:
        """Of its TransferModel from other workers' caches."""
        return _scaled_pair(self._fetch) if self._fetch.known else None

    def leave(self) -> None:
        """The worker is gone. Once only."""
        for standing in (self._prefill, self._handover, self._fetch, self._step):
            standing.leave()

    @property
    def token_s(self) -> float:
        """Seconds per token of prompts of which only the sum of their lengths is known."""
        return (self.known_prefill or self._others.prefill).token_s

    @property
    def usual_token_s(self) -> float:
        """The same of all workers together."""
        return self._others.prefill.token_s

    def prompt_computed(
        self, event: FirstToken, *, num_tokens: int, fetch_expected: bool, view: WorkerView, apart: bool = True
    ) -> None:
        """A prompt of `num_tokens` is computed, on a worker that was as `view` says. `apart`: not in a step with the
        one before."""
        num_fetched = event.num_fetched_tokens
        if fetch_expected:
            self.fetch_odds += ODDS_MEMORY * ((num_fetched > 0) - self.fetch_odds)
        if num_fetched > 0:
            self._others.num_changes += 1
            for transfers in self._fetch.measured():
                transfers.add(num_fetched * self.fetch_nbytes, event.fetch_s)
        prefill_s = event.compute_s or event.prefill_s
        if event.compute_s == 0.0 and view.role is Role.DECODE and view.chunk_tokens and view.num_sequences > 1:
            # Beside each of its chunks the others have made a step.
            num_chunks = math.ceil((num_tokens - event.num_cached_tokens) / view.chunk_tokens)
            step_s = (self.known_step or self._others.step).predict(view.held_tokens, view.num_sequences)
            prefill_s = max(LEAST_PART * prefill_s, prefill_s - num_chunks * step_s)
        self._others.num_changes += 1
        for prompts in (*self._prefill.measured(), self._others.prefill):
            prompts.add(num_tokens, event.num_cached_tokens, prefill_s, apart=apart)

    def first_token_came(self, event: FirstToken, after_s: float) -> None:
        """The first token of a prompt that had nobody in front has come `after_s` after its dispatch."""
        overhead_s = max(after_s - event.prefill_s - event.fetch_s, LEAST_OVERHEAD_S)
        self._others.num_changes += 1
        self._others.overhead[self._role].add((1.0,), overhead_s)

    def handed_over(self, event: HandedOff) -> bool:
        """KV has moved. It is reported with one of several outputs of a prompt. False: there is nothing to learn."""
        if event.kv_bytes <= 0:
            return False
        self._others.num_changes += 1
        for transfers in self._handover.measured():
            transfers.add(event.kv_bytes, max(event.transfer_s, LEAST_TRANSFER_S))
        return True

    def step_done(self, event: StepTokens, *, num_tokens: int, num_sequences: int) -> bool:
        """A step with so many sequences of so many tokens is over. It is measured for those that were new in it. False:
        there is nothing to learn."""
        if num_sequences == 0 or event.first_step_s == self._last_step_s or event.first_step_s <= 0.0:
            return False
        self._last_step_s = event.first_step_s
        self._others.num_changes += 1
        for steps in self._step.measured():
            steps.add(num_tokens, num_sequences, event.first_step_s)
        return True


def _scaled(standing: Standing[PrefillModel] | Standing[StepModel]) -> tuple[float, float, float]:
    factor = standing.believed
    a, b, c = standing.own.coefficients
    return factor * a, factor * b, factor * c


def _scaled_pair(standing: Standing[TransferModel]) -> tuple[float, float]:
    factor = standing.believed
    fixed, per_byte = standing.own.coefficients
    return factor * fixed, factor * per_byte
