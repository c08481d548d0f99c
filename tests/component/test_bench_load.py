"""The load generator against a server whose every pause is known."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pdserve.bench.experiments import Interference, decode_scaling, prefill_scaling
from pdserve.bench.html import html_report
from pdserve.bench.prompts import PromptMaker
from pdserve.bench.records_json import report_json
from pdserve.bench.requests import PlannedRequest
from pdserve.bench.run import measure
from pdserve.bench.statistics import Slo
from pdserve.bench.targets import OpenAiTarget
from pdserve.errors import ConfigError, PdServeError
from pdserve.testing.scripted_openai import Script, ScriptedOpenAi

LATE_S = 0.5
"""What a busy machine may add to a pause. Nothing ever takes less than it."""


def requests(count: int, *, tokens: int = 3, every_s: float = 0.0) -> list[PlannedRequest]:
    return [
        PlannedRequest(index=i, token_ids=(1, 2, 3, 4), output_tokens=tokens, arrival_s=i * every_s)
        for i in range(count)
    ]  # fmt: skip


async def test_ttft_and_itl_are_the_pauses_of_the_server() -> None:
    async with ScriptedOpenAi(Script(first_s=0.2, gap_s=0.05)) as server:
        run = await measure(OpenAiTarget(server.url), requests(3), concurrency=1)
    s = run.summary
    assert s.num_ok == 3 and s.ttft_ms is not None and s.itl_ms is not None and s.tpot_ms is not None
    assert 200 <= s.ttft_ms.p50 <= 200 + 1e3 * LATE_S
    assert s.itl_ms.count == 6 and 45 <= s.itl_ms.p50 <= 50 + 1e3 * LATE_S
    assert s.cached_share == 0.5


async def test_output_lengths_are_forced_and_prompts_go_as_tokens() -> None:
    async with ScriptedOpenAi(Script()) as server:
        await measure(OpenAiTarget(server.url), requests(1, tokens=9), concurrency=1)
        (body,) = server.bodies
    assert (body["max_tokens"], body["ignore_eos"], body["prompt"], body["model"]) == (
        9,
        True,
        [1, 2, 3, 4],
        "scripted",
    )


async def test_latency_of_an_open_loop_counts_from_when_the_request_was_due() -> None:
    """A server that takes one request at a time and is asked too often makes later requests wait longer: an open loop
    must show it, where a client that waits for its turn would see the same latency each time."""
    async with ScriptedOpenAi(Script(first_s=0.1, serial=True)) as server:
        open_loop = await measure(OpenAiTarget(server.url), requests(6, tokens=1, every_s=0.01))
        closed = await measure(OpenAiTarget(server.url), requests(6, tokens=1), concurrency=1)
    waits = [r.ttft_s for r in open_loop.records]
    assert waits[-1] is not None and waits[-1] >= 6 * 0.1 - 5 * 0.01
    assert open_loop.summary.ttft_ms is not None and closed.summary.ttft_ms is not None
    assert open_loop.summary.ttft_ms.max > 2 * closed.summary.ttft_ms.p50


async def test_closed_loop_keeps_to_its_concurrency() -> None:
    async with ScriptedOpenAi(Script(first_s=0.02, gap_s=0.01)) as server:
        run = await measure(OpenAiTarget(server.url), requests(9), concurrency=3)
    for record in run.records:
        running = [r for r in run.records if r.sent_s <= record.sent_s < r.ended_s]
        assert len(running) <= 3
    assert run.summary.num_ok == 9


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (Script(status=500), "http_error"),
        (Script(status=503), "unavailable"),
        (Script(status=429), "overloaded"),
        (Script(break_after=1), "unavailable"),
        (Script(error_after=1), "internal"),
        (Script(tokens=2), "short_answer"),
    ],
)
async def test_every_failure_is_counted(script: Script, code: str) -> None:
    async with ScriptedOpenAi(script) as server:
        run = await measure(OpenAiTarget(server.url), requests(4), slo=Slo(ttft_s=60.0))
    assert run.summary.errors == {code: 4} and run.summary.num_ok == 0
    assert run.summary.attainment is not None and run.summary.attainment.joint == 0.0
    assert all(record.error_message for record in run.records)


async def test_nobody_there_is_an_error_of_each_request() -> None:
    run = await measure(OpenAiTarget("http://127.0.0.1:9", model="m"), requests(2))
    assert run.summary.errors == {"unavailable": 2}


async def test_what_is_still_running_after_the_drain_is_unfinished() -> None:
    async with ScriptedOpenAi(Script(first_s=0.01, gap_s=30.0)) as server:
        run = await measure(OpenAiTarget(server.url), requests(2), drain_s=0.3)
        closed = await measure(OpenAiTarget(server.url), requests(2), concurrency=2, drain_s=0.3)
    assert run.summary.errors == closed.summary.errors == {"unfinished": 2}


async def test_tokens_without_ids_are_counted_by_events_and_usage() -> None:
    async with ScriptedOpenAi(Script(with_ids=False)) as server:
        run = await measure(OpenAiTarget(server.url), requests(2, tokens=5), concurrency=1)
    assert [len(record.token_times_s) for record in run.records] == [5, 5]


async def test_a_server_that_cannot_tokenize_is_told_of() -> None:
    async with ScriptedOpenAi(Script()) as server:
        target = OpenAiTarget(server.url)
        assert len(await target.tokenize("a b a")) == 3
        with pytest.raises(PdServeError, match="no tokens"):
            await target.tokenize("")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        OpenAiTarget(url)


async def test_experiments_show_what_the_script_does() -> None:
    async with ScriptedOpenAi(Script(first_s=0.02, gap_s=0.02)) as server:
        target = OpenAiTarget(server.url)
        maker = await PromptMaker.of(target, seed=0)
        prefill = await prefill_scaling(target, maker, [8, 16, 32], repetitions=2)
        decode = await decode_scaling(target, maker, [1, 4], prompt_tokens=8, output_tokens=12)
        interference = Interference(
            streams=2, stream_prompt_tokens=4, stream_tokens=40, long_tokens=64, long_count=1, period_s=0.3
        )  # fmt: skip
        await interference.add("scripted", target, maker)
    assert [p["count"] for p in prefill.findings["points"]] == [2, 2, 2] and prefill.findings["fit_ms"] is not None
    one, four = decode.findings["points"]
    assert one["tokens_per_step"] == pytest.approx(1, rel=0.5) and four["tokens_per_step"] > 2 * one["tokens_per_step"]
    (point,) = interference.outcome().findings["points"]
    assert point["alone_ms"]["p50"] >= 19 and point["p99_ratio"] > 0 and point["long_ttft_ms"]["count"] == 1


async def test_the_report_is_one_valid_file_that_needs_nothing_else(tmp_path: Path) -> None:
    async with ScriptedOpenAi(Script(first_s=0.01)) as server:
        run = await measure(OpenAiTarget(server.url), requests(5), concurrency=2, name="a <b> & c")
    report = report_json("run", {"note": "</pre><script>"}, [run], {})
    page = html_report(report, [run], [])
    # No scripts, links, images or styles of others. (The namespace of SVG is a name, not a link.)
    assert not re.search(r"<(script|link|img|iframe)|\bsrc=|href=|url\(|@import", page, re.IGNORECASE)
    body = page.removeprefix("<!DOCTYPE html>\n").replace('<meta charset="utf-8">', "")
    root = ElementTree.fromstring(body)
    assert len(root.findall(".//figure")) == 6
    assert "a <b> & c" in "".join(root.itertext())
    assert "coordinated omission" in page
