"""`pdserve bench`: measure a server under load, and the experiments that show what each phase costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from pdserve.cli.bench_experiments import decode_scaling, goodput, interference, prefill_scaling
from pdserve.cli.bench_options import chosen_salt, make_target, output_options, seed_options, target_options
from pdserve.cli.bench_output import live_progress, show_outcome
from pdserve.cli.bench_workload import WorkloadOptions, workload_options


@click.group()
def bench() -> None:
    """Measure pdserve, or any server of the OpenAI API, under load.

    `run` offers a workload and reports latencies, throughput and goodput. The others are experiments: what a prompt
    costs by its length, what a step costs by the number of streams, what long prompts do to running streams, and the
    largest rate that keeps an SLO.
    """


@bench.command()
@target_options
@workload_options
@seed_options
@click.option("--concurrency", type=click.IntRange(min=1), help="Closed loop: always so many requests.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Open loop: requests per second.")
@click.option(
    "--burstiness",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts.",
)
@click.option("--replay", is_flag=True, help="Open loop: arrivals as the trace has them.")
@click.option(
    "--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Of the replay."
)
@click.option(
    "--jitter",
    "jitter_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Spread replayed arrivals over so much of the trace's time: 3 for Mooncake's, which come in ticks of 3 s.",
)
@click.option("--warmup", type=click.IntRange(min=0), default=0, show_default=True, help="First requests not counted.")
@click.option(
    "--drain",
    "drain_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="What requests may take after the last was sent; then they fail as `unfinished`.",
)
@click.option("--slo-ttft", "slo_ttft_ms", metavar="MS", type=click.FloatRange(min=0), help="Bound for goodput.")
@click.option("--slo-tpot", "slo_tpot_ms", metavar="MS", type=click.FloatRange(min=0), help="Bound for goodput.")
@output_options
def run(
    router: str | None,
    openai: str | None,
    model: str | None,
    seed: int,
    prompt_salt: int | None,
    concurrency: int | None,
    rate: float | None,
    burstiness: float,
    replay: bool,
    speed: float,
    jitter_s: float,
    warmup: int,
    drain_s: float,
    slo_ttft_ms: float | None,
    slo_tpot_ms: float | None,
    as_json: bool,
    out: Path | None,
    html: Path | None,
    **workload: Any,
) -> int:
    """Offer a workload and report what came of it.

    Open loop with --rate or --replay, closed loop with --concurrency. Exit status 1 if no request succeeded.
    """
    from pdserve.bench.arrivals import gamma_arrivals, replayed_arrivals
    from pdserve.bench.experiments.outcome import Outcome
    from pdserve.bench.prompts import PromptMaker
    from pdserve.bench.run import RunResult, measure
    from pdserve.bench.statistics import Slo

    salt = chosen_salt(prompt_salt)
    settings = {
        "concurrency": concurrency, "rate": rate, "burstiness": burstiness, "replay": replay, "speed": speed,
        "jitter_s": jitter_s, "warmup": warmup, "drain_s": drain_s, "seed": seed,
        "prompt_salt": salt, **workload,
    }  # fmt: skip
    if (concurrency is not None) + (rate is not None) + replay != 1:
        raise click.UsageError("give one of --rate, --replay and --concurrency")
    options = WorkloadOptions(**workload)
    slo = None
    if slo_ttft_ms is not None or slo_tpot_ms is not None:
        slo = Slo(
            ttft_s=None if slo_ttft_ms is None else slo_ttft_ms / 1e3,
            tpot_s=None if slo_tpot_ms is None else slo_tpot_ms / 1e3,
        )

    async def main() -> RunResult:
        target = make_target(router, openai, model)
        try:
            maker = await PromptMaker.of(target, seed=seed, salt=salt)
            requests, recorded = await options.requests(target, maker, seed)
            if rate is not None:
                arrivals = gamma_arrivals(len(requests), rate, burstiness=burstiness, seed=seed)
                requests = options.timed(requests, arrivals)
            elif replay:
                arrivals = replayed_arrivals(recorded, speed=speed, jitter_s=jitter_s, seed=seed)
                requests = options.timed(requests, arrivals)
            with live_progress() as progress:
                return await measure(
                    target, requests, concurrency=concurrency, warmup=warmup, slo=slo, drain_s=drain_s,
                    progress=progress,
                )  # fmt: skip
        finally:
            await target.close()

    outcome = Outcome(runs=[asyncio.run(main())], rows=[], findings={}, notes=[], plots=[])
    return show_outcome("run", outcome, settings, as_json=as_json, out=out, html=html)


bench.add_command(prefill_scaling)
bench.add_command(decode_scaling)
bench.add_command(interference)
bench.add_command(goodput)
