"""The options of `pdserve bench` that say what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from pdserve.bench.prompts import PromptMaker
    from pdserve.bench.requests import PlannedRequest
    from pdserve.bench.targets import Target

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def workload_options(command: CommandT) -> CommandT:
    """Add them; their values fit `WorkloadOptions`."""
    for option in (
        click.option("--requests", "count", type=click.IntRange(min=1), help="How many. Default: 100; of a file, all."),
        click.option(
            "--data",
            metavar="random|shared-prefix|mt-bench|FILE",
            default="random",
            show_default=True,
            help="Made-up prompts, the shipped questions, or a file: JSONL of prompts, token ids or a Mooncake trace, "
            "or an Azure trace (CSV); .gz too.",
        ),
        click.option(
            "--input-tokens", default="512", show_default=True, metavar="N|LOW:HIGH", help="Of made-up prompts."
        ),
        click.option(
            "--output-tokens", default="128", show_default=True, metavar="N|LOW:HIGH",
            help="Forced output lengths of made-up prompts, and of lines of a file that give none (there the larger).",
        ),
        click.option(
            "--prefix-tokens", type=click.IntRange(min=1), default=256, show_default=True,
            help="Of each beginning that shared-prefix prompts share.",
        ),
        click.option(
            "--prefix-groups", type=click.IntRange(min=1), default=4, show_default=True, help="How many beginnings."
        ),
        click.option(
            "--length-scale", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
            help="Multiplies lengths of traces, to fit a smaller machine.",
        ),
        click.option("--max-input-tokens", type=click.IntRange(min=1), help="Cut prompts of files here."),
        click.option("--max-output-tokens", type=click.IntRange(min=1), help="Cut outputs of files here."),
    ):  # fmt: skip
        command = option(command)
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Their values."""

    count: int | None
    data: str
    input_tokens: str
    output_tokens: str
    prefix_tokens: int
    prefix_groups: int
    length_scale: float
    max_input_tokens: int | None
    max_output_tokens: int | None

    async def requests(
        self, target: Target, maker: PromptMaker, seed: int
    ) -> tuple[list[PlannedRequest], list[float]]:  # fmt: skip
        """Requests that are not due yet, and the recorded arrivals, without which there is no replay. Raises
        InvalidRequestError."""
        from pdserve.bench.lengths import Lengths
        from pdserve.bench.prompts import STATIC
        from pdserve.bench.recorded import read_requests
        from pdserve.bench.replay import Fit, planned
        from pdserve.bench.synthetic import random_requests, shared_prefix_requests

        prompt, output = Lengths.parse(self.input_tokens), Lengths.parse(self.output_tokens)
        if self.data == "random":
            return random_requests(maker, self.count or 100, prompt=prompt, output=output, seed=seed), []
        if self.data == "shared-prefix":
            requests = shared_prefix_requests(
                maker, self.count or 100, prompt=prompt, output=output, prefix_tokens=self.prefix_tokens,
                groups=self.prefix_groups, seed=seed,
            )  # fmt: skip
            return requests, []
        path = STATIC / "mt_bench.jsonl" if self.data == "mt-bench" else Path(self.data)
        recorded = read_requests(path, self.count)
        fit = Fit(
            length_scale=self.length_scale,
            max_input_tokens=self.max_input_tokens,
            max_output_tokens=self.max_output_tokens,
            default_output_tokens=output.high,
        )
        return await planned(recorded, target, maker, fit), [r.arrival_s for r in recorded if r.arrival_s is not None]

    def timed(self, requests: Sequence[PlannedRequest], arrivals: Sequence[float]) -> list[PlannedRequest]:
        """Requests with when they are due. Raises click.UsageError if there is not one time for each."""
        if len(arrivals) != len(requests):
            raise click.UsageError(f"--replay: {self.data} has no arrivals; give --rate or --concurrency")
        return [replace(request, arrival_s=at) for request, at in zip(requests, arrivals, strict=True)]
