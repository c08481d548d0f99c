"""Made-up workloads: random prompts, and prompts that share beginnings."""

from __future__ import annotations

import numpy as np

from pdserve.bench.lengths import Lengths
from pdserve.bench.prompts import PromptMaker
from pdserve.bench.requests import PlannedRequest

_PREFIX_NAMES = 1 << 40
"""Names of prefixes begin here, so that no prompt's own part has one of them."""


def random_requests(
    maker: PromptMaker, count: int, *, prompt: Lengths, output: Lengths, seed: int, first_name: int = 0
) -> list[PlannedRequest]:
    """No two prompts have anything in common but by chance. `first_name` keeps workloads of one run apart."""
    return shared_prefix_requests(
        maker, count, prompt=prompt, output=output, prefix_tokens=0, groups=1, seed=seed, first_name=first_name
    )


def shared_prefix_requests(
    maker: PromptMaker,
    count: int,
    *,
    prompt: Lengths,
    output: Lengths,
    prefix_tokens: int,
    groups: int,
    seed: int,
    first_name: int = 0,
) -> list[PlannedRequest]:
    """Each prompt is one of `groups` beginnings of `prefix_tokens` tokens, as system prompts are, and then `prompt`
    tokens of its own. Which beginning is drawn evenly."""
    random = np.random.default_rng(seed)
    inputs, outputs = prompt.draw(count, random), output.draw(count, random)
    chosen = random.integers(0, groups, count).tolist()
    prefixes = [maker.draw(_PREFIX_NAMES + group, prefix_tokens) for group in range(groups)]
    return [
        PlannedRequest(
            index=i,
            token_ids=prefixes[chosen[i]] + maker.draw(first_name + i, inputs[i]),
            output_tokens=outputs[i],
        )
        for i in range(count)
    ]
