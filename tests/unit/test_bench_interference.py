"""Gaps between tokens of streams that long prompts of others are to be blamed for."""

from __future__ import annotations

import pytest

from pdserve.bench.experiments import Interference
from pdserve.bench.requests import PlannedRequest, RequestRecord
from pdserve.bench.run import RunResult
from pdserve.bench.statistics import summarize


def run_of(*times_s: list[float], group: str = "stream") -> RunResult:
    records = [
        RequestRecord(
            request=PlannedRequest(index=i, token_ids=(1,), output_tokens=len(times), group=group),
            due_s=0.0,
            sent_s=0.0,
            token_times_s=times,
            ended_s=times[-1],
        )
        for i, times in enumerate(times_s)
    ]
    return RunResult(name="run", target="t", records=records, queues=[], summary=summarize(records))


@pytest.mark.parametrize(
    ("times_s", "gaps_ms"),
    [
        # The window is from 2 s to 6 s.
        ([1.0, 1.5, 1.9], []),
        ([1.0, 2.5, 3.0], [1500, 500]),
        # A stall that goes on after its end.
        ([1.9, 14.0, 14.5], [12100]),
        ([3.0, 5.5, 6.5, 7.0], [2500, 1000]),
        # Tokens of one message.
        ([3.0, 3.5, 3.5, 4.0], [500, 500]),
    ],
)
def test_gaps_count_that_have_a_part_in_the_window(times_s: list[float], gaps_ms: list[float]) -> None:
    experiment = Interference(
        streams=1, stream_prompt_tokens=1, stream_tokens=9, long_tokens=9, long_count=2, period_s=2.0
    )
    assert experiment.window_s == (2.0, 6.0)
    assert experiment.gaps_ms(run_of(times_s)) == pytest.approx(gaps_ms)
    assert experiment.gaps_ms(run_of(times_s, group="long prompt")) == []
