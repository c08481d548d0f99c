"""The flight recorder remembers a bounded number of steps and jobs, and writes them when asked, and after a crash."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from pdserve.service import serve_until_stopped
from pdserve.telemetry.chrome import ChromeTrace, Slice
from pdserve.telemetry.context import TraceContext, parse
from pdserve.telemetry.dump import FlightDump
from pdserve.telemetry.spans import SpanRecord
from pdserve.testing.waiting import eventually
from pdserve.types import FinishReason, GenerationJob, HandoffId
from pdserve.worker.engine_thread import StepResult
from pdserve.worker.events import FirstToken, HandedOff, JobFailed, StepTokens
from pdserve.worker.recorder import JobRecorder

PARENT = TraceContext(7, 9, sampled=True)
KEY = HandoffId("q", 1)


class Spans:
    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []

    def export(self, span: SpanRecord) -> None:
        self.spans.append(span)

    def close(self) -> None:
        self.spans.clear()


def job(traceparent: str = "") -> GenerationJob:
    return GenerationJob(
        request_id="q",
        attempt=1,
        router_id="r",
        token_ids=(1, 2),
        num_prompt_tokens=2,
        max_new_tokens=4,
        traceparent=traceparent,
    )


def step(duration_s: float = 0.25) -> StepResult:
    return StepResult(token_ids=[1], logprobs={}, prompt_logprobs={}, duration_s=duration_s, query_lens=[3, 1])


def tokens(finish: FinishReason | None) -> StepTokens:
    return StepTokens(
        id=KEY, first_index=1, token_ids=(5,), finish_reason=finish, first_step_s=0.0, local_prefill_tokens=0
    )


FIRST = FirstToken(id=KEY, index=0, token_id=4, finish_reason=None, queue_s=0.5, prefill_s=0.25)
HANDED_OFF = HandedOff(id=KEY, decode_worker="d", transport="tcp", kv_bytes=10, transfer_s=0.1)


def slices(recorder: JobRecorder) -> list[dict[str, object]]:
    return [event for event in recorder.chrome_trace().as_json()["traceEvents"] if event["ph"] == "X"]


def test_steps_are_remembered_with_what_was_in_them_and_the_oldest_is_forgotten() -> None:
    recorder = JobRecorder("w", max_steps=3)
    for _ in range(5):
        recorder.step_done(step())
    found = slices(recorder)
    assert [one["name"] for one in found] == ["step"] * 3
    assert found[0]["args"] == {"sequences": 2, "tokens": 4, "blocks_in_use": 0}
    assert found[0]["dur"] == pytest.approx(250_000, abs=1)


def test_a_traced_job_becomes_spans_below_the_routers_and_others_only_records() -> None:
    sink = Spans()
    recorder = JobRecorder("w", max_steps=8, sink=sink)
    recorder.begin(job())
    recorder.tell([FIRST])
    assert sink.spans == []
    recorder.begin(job(PARENT.header))
    recorder.tell([FIRST, HANDED_OFF])
    recorder.restart(KEY)
    recorder.tell([tokens(None)])
    recorder.tell([tokens(FinishReason.LENGTH)])
    assert [span.name for span in sink.spans] == ["prefill_queue", "prefill", "kv_transfer", "decode"]
    assert {span.parent for span in sink.spans} == {PARENT}
    queue, prefill, _, decode = sink.spans
    assert queue.end - queue.start == pytest.approx(0.5)
    assert prefill.end - prefill.start == pytest.approx(0.25)
    assert queue.end == prefill.start
    assert decode.attributes["gen_ai.usage.output_tokens"] == 2
    recorder.forget(KEY)
    recorder.tell([JobFailed(id=KEY, code="internal", message="", retryable=False)])
    assert len(sink.spans) == 4


def test_a_job_that_is_given_up_says_why() -> None:
    sink = Spans()
    recorder = JobRecorder("w", max_steps=8, sink=sink)
    recorder.begin(job(PARENT.header))
    recorder.tell([JobFailed(id=KEY, code="overloaded", message="", retryable=True)])
    assert [span.error for span in sink.spans] == ["overloaded"]


def test_what_overlaps_gets_tracks_of_its_own() -> None:
    trace = ChromeTrace("p", 1)
    trace.add_groups("jobs", [[Slice("a", 0.0, 2.0)], [Slice("b", 1.0, 3.0)], [Slice("c", 2.5, 4.0)]])
    found = {event["name"]: event["tid"] for event in trace.as_json()["traceEvents"] if event["ph"] == "X"}
    assert found["a"] == found["c"] != found["b"]


@pytest.mark.parametrize(
    ("header", "sampled"),
    [("00-" + "a" * 32 + "-" + "b" * 16 + "-01", True), ("01-" + "a" * 32 + "-" + "b" * 16 + "-00-more", False)],
)
def test_contexts_are_read_by_the_specification(header: str, sampled: bool) -> None:
    context = parse(header)
    assert context is not None and context.sampled is sampled
    assert parse(context.header) == context
    assert context.child().trace_id == context.trace_id


@pytest.mark.parametrize(
    "header",
    ["", "x", "ff-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-" + "0" * 32 + "-" + "b" * 16 + "-01",
     "00-" + "a" * 32 + "-" + "0" * 16 + "-01", "00-" + "a" * 32 + "-" + "b" * 16 + "-01-x", "0" * 10_000],
)  # fmt: skip
def test_malformed_contexts_begin_a_new_trace(header: str) -> None:
    assert parse(header) is None


class Failing:
    """A service that asks for a dump and then fails."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def start(self) -> None:
        """Is up at once."""

    async def run(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        await eventually(lambda: any(self.directory.iterdir()), "the dump for the signal is there")
        raise RuntimeError("as planned")

    async def drain(self) -> None:
        raise AssertionError("it has failed")

    async def stop(self) -> None:
        """Has nothing."""


def test_a_signal_and_a_crash_write_what_is_remembered(tmp_path: Path) -> None:
    recorder = JobRecorder("w", max_steps=3)
    recorder.step_done(step())
    reasons: list[str] = []
    write = FlightDump(lambda: f"w{len(reasons)}", recorder.chrome_trace, str(tmp_path))

    def dump(reason: str) -> None:
        reasons.append(reason)
        assert write(reason) is not None

    with pytest.raises(RuntimeError, match="as planned"):
        asyncio.run(serve_until_stopped(Failing(tmp_path), dump))
    assert reasons == ["signal", "crash"]
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        assert any(event.get("name") == "step" for event in json.loads(file.read_text())["traceEvents"])
        assert file.stat().st_mode & 0o077 == 0


def test_a_dump_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recorder = JobRecorder("w", max_steps=3)
    assert FlightDump(lambda: "w", recorder.chrome_trace, str(tmp_path / "file"))("signal") is None
