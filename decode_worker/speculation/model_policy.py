"""How many tokens the draft model drafts: as many as make a step worth more than it costs, drafting included.

A look-up costs nothing and so can be judged without being used. A model cannot: what it would have been worth is known
only from drafts that were made. So while it does not pay it is tried now and then.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from decode_worker.speculation.costs import StepCosts

KEEPS_UP: Final = 16
"""Steps without a draft after which the model's KV is no longer kept up to date: it may be on again in a moment."""
TRY_AGAIN: Final = 256
"""Steps without a draft after which one is made to see whether things have changed."""
TRIAL_TOKENS: Final = 2
"""Of that."""
GIVES_UP: Final = TRY_AGAIN + 16
"""Steps without a draft after which that waits for the next time, since what runs now leaves no way to make one. Steps
beside which the KV for it is computed are not counted."""


class ModelPolicy:
    """Told of every step in which each sequence drew a token."""

    def __init__(self, max_tokens: int, *, always: bool) -> None:
        """At most `max_tokens` for one sequence; `always` as many as there may be, whatever it costs."""
        self._max_tokens = max_tokens
        self._always = always
        self._costs = StepCosts()
        self._num_idle = 0
        """Steps since the last one for which something was drafted; from GIVES_UP on it goes back to KEEPS_UP."""

    @property
    def keeps_up(self) -> bool:
        """Whether the model's KV of prompts and outputs is to be computed as they come."""
        return self._always or not KEEPS_UP <= self._num_idle < TRY_AGAIN

    def wanted(self, num_context_tokens: int, chances: Seq[Seq[float]], least: float) -> int:
        """Tokens to draft for each sequence of the next step, 0 for none. `chances` has for each of them that of its
        first tokens to be right, shorter where fewer may be drafted; their number is what `num_context_tokens` tokens
        of context belong to. It must promise more than `least` tokens in the time of a plain step."""
        longest = min(max(map(len, chances), default=0), self._max_tokens)
        if self._always or longest == 0:
            return longest
        if self._num_idle >= TRY_AGAIN:
            return min(TRIAL_TOKENS, longest)
        num_sequences = len(chances)
        num_tokens, best_rate, best, num_drafted = float(num_sequences), least, 0, 0
        for number in range(1, longest + 1):
            more = [row[number - 1] for row in chances if len(row) >= number]
            num_tokens += sum(more)
            num_drafted += len(more)
            ratio = self._costs.ratio(num_sequences, num_context_tokens, num_drafted)
            if ratio is None:
                return 0
            if num_tokens / ratio > best_rate:
                best_rate, best = num_tokens / ratio, number
        return best

    def stepped(self, num_sequences: int, num_context_tokens: int, num_drafted: int, step_s: float) -> None:
        """A step is over, and what was drafted for it, `step_s` in all. `num_drafted` 0: a plain one."""
        self._num_idle = 0 if num_drafted else self._num_idle + 1
        if self._num_idle == GIVES_UP:
            self._num_idle = KEEPS_UP
        self._costs.note(num_sequences, num_context_tokens, num_drafted, step_s)
