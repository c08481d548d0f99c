"""`pdserve bench prefill-scaling|decode-scaling|interference|goodput`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdserve.cli.bench_options import (
    OPENAI_KEY,
    Layout,
    chosen_salt,
    lengths,
    make_target,
    numbers,
    output_options,
    plain,
    seed_options,
    servers_options,
    target_options,
)
from pdserve.cli.bench_output import live_progress, show_outcome
from pdserve.cli.options import read_config

if TYPE_CHECKING:
    from pdserve.bench.experiments import Outcome
    from pdserve.bench.prompts import PromptMaker
    from pdserve.bench.roofline import ModelWork, Roofs
    from pdserve.bench.run import RunResult
    from pdserve.bench.targets import Target

roofline_option = click.option(
    "--roofline",
    "roofline_model",
    metavar="MODEL",
    help="Measure this machine's bandwidth and arithmetic first, and show what of them is reached. MODEL is the served "
    "model's path or name, on this machine. Only where the server runs on it too.",
)

Measure = Callable[[str, "Target", "PromptMaker"], Awaitable[object]]


@click.command("prefill-scaling")
@target_options
@click.option(
    "--lengths", "prompt_lengths", default="16,64,128,256,512,1024,2048", show_default=True, help="Prompt tokens."
)
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@roofline_option
@seed_options
@output_options
def prefill_scaling(
    router: str | None,
    openai: str | None,
    model: str | None,
    prompt_lengths: str,
    repetitions: int,
    roofline_model: str | None,
    seed: int,
    prompt_salt: int | None,
    as_json: bool,
    out: Path | None,
    html: Path | None,
) -> int:
    """Prompts of growing length, one at a time: TTFT with its parts, and a + b n + c n^2."""
    from pdserve.bench.experiments import prefill_scaling as experiment
    from pdserve.bench.prompts import PromptMaker

    tokens, salt = numbers(prompt_lengths, "--lengths"), chosen_salt(prompt_salt)
    settings = {"lengths": tokens, "repetitions": repetitions, "seed": seed, "prompt_salt": salt}
    roofs = _roofs(roofline_model)

    async def main() -> Outcome:
        target = make_target(router, openai, model)
        try:
            maker = await PromptMaker.of(target, seed=seed, salt=salt)
            with live_progress() as progress:
                return await experiment(target, maker, tokens, repetitions=repetitions, roofs=roofs, progress=progress)
        finally:
            await target.close()

    outcome = _with_roofs(asyncio.run(main()), roofs)
    return show_outcome("prefill-scaling", outcome, plain(settings), as_json=as_json, out=out, html=html)


@click.command("decode-scaling")
@target_options
@click.option("--streams", default="1,2,4,8,16,32", show_default=True, help="Levels of concurrency.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--output-tokens", type=click.IntRange(min=4), default=128, show_default=True)
@roofline_option
@seed_options
@output_options
def decode_scaling(
    router: str | None,
    openai: str | None,
    model: str | None,
    streams: str,
    prompt_tokens: int,
    output_tokens: int,
    roofline_model: str | None,
    seed: int,
    prompt_salt: int | None,
    as_json: bool,
    out: Path | None,
    html: Path | None,
) -> int:
    """One prompt length, growing concurrency: tokens per step, step time, TPOT."""
    from pdserve.bench.experiments import decode_scaling as experiment
    from pdserve.bench.prompts import PromptMaker

    levels, salt = numbers(streams, "--streams"), chosen_salt(prompt_salt)
    settings = {
        "streams": levels, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "seed": seed,
        "prompt_salt": salt,
    }  # fmt: skip
    roofs = _roofs(roofline_model)

    async def main() -> Outcome:
        target = make_target(router, openai, model)
        try:
            maker = await PromptMaker.of(target, seed=seed, salt=salt)
            with live_progress() as progress:
                return await experiment(
                    target, maker, levels, prompt_tokens=prompt_tokens, output_tokens=output_tokens, roofs=roofs,
                    progress=progress,
                )  # fmt: skip
        finally:
            await target.close()

    outcome = _with_roofs(asyncio.run(main()), roofs)
    return show_outcome("decode-scaling", outcome, plain(settings), as_json=as_json, out=out, html=html)


@click.command()
@servers_options
@click.option("--streams", type=click.IntRange(min=1), default=4, show_default=True, help="That run all the time.")
@click.option("--stream-tokens", type=click.IntRange(min=2), default=1024, show_default=True, help="Of each of them.")
@click.option("--long-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Of each long prompt.")
@click.option("--long-count", type=click.IntRange(min=1), default=4, show_default=True, help="Long prompts.")
@click.option(
    "--period", "period_s", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True,
    help="Seconds between them.",
)  # fmt: skip
@seed_options
@output_options
def interference(
    layouts: Sequence[str],
    urls: Sequence[str],
    model: str | None,
    config_path: str | None,
    settings: Sequence[str],
    streams: int,
    stream_tokens: int,
    long_tokens: int,
    long_count: int,
    period_s: float,
    seed: int,
    prompt_salt: int | None,
    as_json: bool,
    out: Path | None,
    html: Path | None,
) -> int:
    """Streams run while long prompts arrive: what becomes of their inter-token latency.

    Default: split (--layout 1:1) against not split (--layout 0:1), each started here, one after the other.
    """
    from pdserve.bench.experiments import Interference

    salt = chosen_salt(prompt_salt)
    experiment = Interference(
        streams=streams,
        stream_prompt_tokens=64,
        stream_tokens=stream_tokens,
        long_tokens=long_tokens,
        long_count=long_count,
        period_s=period_s,
    )
    with live_progress() as progress:

        async def measure(name: str, target: Target, maker: PromptMaker) -> None:
            await experiment.add(name, target, maker, progress=progress)

        names = _for_each(layouts, urls, model, config_path, settings, seed, salt, measure)
    told = {
        "servers": names, "streams": streams, "stream_tokens": stream_tokens, "long_tokens": long_tokens,
        "long_count": long_count, "period_s": period_s, "seed": seed, "prompt_salt": salt, "set": settings,
    }  # fmt: skip
    return show_outcome("interference", experiment.outcome(), plain(told), as_json=as_json, out=out, html=html)


@click.command()
@servers_options
@click.option("--slo-ttft", "slo_ttft_ms", type=click.FloatRange(min=0), default=1500.0, show_default=True, help="ms.")
@click.option("--slo-tpot", "slo_tpot_ms", type=click.FloatRange(min=0), default=40.0, show_default=True, help="ms.")
@click.option(
    "--attainment", type=click.FloatRange(min=0, max=1, min_open=True), default=0.9, show_default=True,
    help="Share of requests that have to meet both bounds.",
)  # fmt: skip
@click.option("--requests", "count", type=click.IntRange(min=2), default=100, show_default=True, help="Of each run.")
@click.option("--input-tokens", default="128:1024", show_default=True, metavar="N|LOW:HIGH")
@click.option("--output-tokens", default="64", show_default=True, metavar="N|LOW:HIGH")
@click.option(
    "--start-rate", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Tried first."
)
@click.option(
    "--tolerance", type=click.FloatRange(min=0, min_open=True), default=0.1, show_default=True,
    help="Share by which the rates that passed and failed may differ at the end.",
)  # fmt: skip
@click.option("--max-runs", type=click.IntRange(min=1), default=16, show_default=True, help="Of each server.")
@seed_options
@output_options
def goodput(
    layouts: Sequence[str],
    urls: Sequence[str],
    model: str | None,
    config_path: str | None,
    settings: Sequence[str],
    slo_ttft_ms: float,
    slo_tpot_ms: float,
    attainment: float,
    count: int,
    input_tokens: str,
    output_tokens: str,
    start_rate: float,
    tolerance: float,
    max_runs: int,
    seed: int,
    prompt_salt: int | None,
    as_json: bool,
    out: Path | None,
    html: Path | None,
) -> int:
    """The largest Poisson rate at which enough requests meet the SLO, of each server.

    Default: split (--layout 1:1) against not split (--layout 0:1). Give further --layout P:D to compare.
    """
    from pdserve.bench.arrivals import poisson_arrivals
    from pdserve.bench.experiments import GoodputSearch
    from pdserve.bench.run import measure
    from pdserve.bench.statistics import Slo
    from pdserve.bench.synthetic import random_requests

    salt = chosen_salt(prompt_salt)
    search = GoodputSearch(attainment=attainment, start_rate=start_rate, tolerance=tolerance, max_runs=max_runs)
    slo = Slo(ttft_s=slo_ttft_ms / 1e3, tpot_s=slo_tpot_ms / 1e3)
    prompt, output = lengths(input_tokens), lengths(output_tokens)
    with live_progress() as progress:

        async def search_one(name: str, target: Target, maker: PromptMaker) -> None:
            tried = 0

            async def run_at(rate: float) -> RunResult:
                nonlocal tried
                # Other prompts each time: a prefix cache would make each run easier than the one before.
                requests = random_requests(
                    maker, count, prompt=prompt, output=output, seed=seed, first_name=tried * count
                )
                tried += 1
                arrivals = poisson_arrivals(count, rate, seed=seed)
                timed = [replace(r, arrival_s=at) for r, at in zip(requests, arrivals, strict=True)]
                return await measure(target, timed, name=f"{name} at {rate:.3g}/s", slo=slo, progress=progress)

            await search.add(name, run_at)

        names = _for_each(layouts, urls, model, config_path, settings, seed, salt, search_one)
    told = {
        "servers": names, "slo_ttft_ms": slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms, "attainment": attainment,
        "requests": count, "input_tokens": input_tokens, "output_tokens": output_tokens, "arrivals": "Poisson",
        "seed": seed, "prompt_salt": salt, "set": settings,
    }  # fmt: skip
    return show_outcome("goodput", search.outcome(), plain(told), as_json=as_json, out=out, html=html)


def _for_each(
    layouts: Sequence[str],
    urls: Sequence[str],
    model: str | None,
    config_path: str | None,
    settings: Sequence[str],
    seed: int,
    salt: int,
    measure: Measure,
) -> list[str]:
    """Measure clusters that are started here, one at a time, and then running servers. Returns their names."""
    from pdserve.bench.targets import GrpcTarget, OpenAiTarget
    from pdserve.launch.cluster import LocalCluster

    plans = [Layout.parse(text) for text in layouts or (() if urls else ("1:1", "0:1"))]
    for plan in plans:
        config = read_config(
            config_path, settings, router__listen="127.0.0.1:0", local__prefill_workers=plan.prefill,
            local__decode_workers=plan.decode,
        )  # fmt: skip
        with LocalCluster(config) as cluster:
            asyncio.run(_measure_one(plan.name, partial(GrpcTarget, cluster.address), seed, salt, measure))
    for url in urls:
        make = partial(OpenAiTarget, url, model=model, api_key=os.environ.get(OPENAI_KEY))
        asyncio.run(_measure_one(url, make, seed, salt, measure))
    return [plan.name for plan in plans] + list(urls)


async def _measure_one(name: str, make: Callable[[], Target], seed: int, salt: int, measure: Measure) -> None:
    from pdserve.bench.prompts import PromptMaker

    # Made here, because connections belong to the event loop that runs.
    target = make()
    try:
        await measure(name, target, await PromptMaker.of(target, seed=seed, salt=salt))
    finally:
        await target.close()


def _roofs(model: str | None) -> tuple[Roofs, ModelWork] | None:
    if model is None:
        return None
    from pdserve.bench.roofline import ModelWork, Roofs

    return Roofs.measure(), ModelWork.of(model)


def _with_roofs(outcome: Outcome, roofs: tuple[Roofs, ModelWork] | None) -> Outcome:
    if roofs is None:
        return outcome
    machine = roofs[0]
    note = (
        f"this machine: {machine.bytes_per_s / 1e9:.1f} GB/s, {machine.flop_per_s / 1e9:.1f} GFLOP/s (float32), "
        f"arithmetic is the bound from {machine.ridge:.1f} FLOP/byte on"
    )
    found = {"bytes_per_s": machine.bytes_per_s, "flop_per_s": machine.flop_per_s}
    return replace(outcome, notes=[*outcome.notes, note], findings=outcome.findings | {"roofs": found})
