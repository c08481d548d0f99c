"""Interference: what long prompts of others do to streams that already run.

The same streams twice on each server: undisturbed, and while a long prompt arrives every so often. Compared are
the gaps between tokens of the streams, in the same stretch of time of both runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pdserve.bench.experiments.outcome import Outcome
from pdserve.bench.load import Progress
from pdserve.bench.prompts import PromptMaker
from pdserve.bench.requests import PlannedRequest
from pdserve.bench.run import RunResult, measure
from pdserve.bench.statistics import Distribution
from pdserve.bench.svg import Series, cdf, line_plot
from pdserve.bench.targets import Target

STREAM, LONG = "stream", "long prompt"


@dataclass(slots=True, kw_only=True)
class Interference:
    """Measures one server after the other, then compares."""

    streams: int
    stream_prompt_tokens: int
    stream_tokens: int
    """Output of each stream. Must outlast the long prompts; a note says if it did not."""
    long_tokens: int
    long_count: int
    period_s: float
    runs: list[RunResult] = field(default_factory=list)
    _points: list[dict[str, Any]] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)

    @property
    def window_s(self) -> tuple[float, float]:
        """From when the first long prompt is due to one period after the last."""
        return self.period_s, self.period_s * (self.long_count + 1)

    async def add(
        self, name: str, target: Target, maker: PromptMaker, *, progress: Progress | None = None
    ) -> None:  # fmt: skip
        """Both runs on one server."""
        alone = await measure(
            target, self._requests(maker, 0, disturbed=False), name=f"{name}: alone", progress=progress
        )
        disturbed = await measure(
            target, self._requests(maker, 10_000, disturbed=True), name=f"{name}: disturbed", progress=progress
        )
        self.runs += [alone, disturbed]
        before, after = (Distribution.of(self.gaps_ms(run)) for run in (alone, disturbed))
        # A server whose streams have ended by then has nothing to disturb.
        end_s = min((r.ended_s for r in disturbed.records if r.request.group == STREAM), default=0.0)
        if end_s < self.window_s[0] + self.period_s * (self.long_count - 1):
            self._notes.append(
                f"{name}: a stream ended after {end_s:.1f} s, before the last long prompt was due: make streams longer"
            )
        long_ttft = Distribution.of(
            [1e3 * t for r in disturbed.records if r.request.group == LONG and (t := r.ttft_s) is not None]
        )
        self._points.append(
            {
                "name": name,
                "alone_ms": None if before is None else asdict(before),
                "disturbed_ms": None if after is None else asdict(after),
                "p99_ratio": None if before is None or after is None else after.p99 / before.p99,
                "long_ttft_ms": None if long_ttft is None else asdict(long_ttft),
            }
        )

    def gaps_ms(self, run: RunResult) -> list[float]:
        """Gaps between messages of the streams that have a part in the window, so that a stall which outlasts it counts
        as long as it is. Tokens that come together, as with speculation, have no time between them and would only
        dilute the stalls."""
        begin, end = self.window_s
        return [
            1e3 * gap
            for record in run.records
            if record.request.group == STREAM
            for at, gap in zip(record.token_times_s[1:], record.gaps_s, strict=True)
            if begin <= at and at - gap <= end and gap > 0
        ]

    def outcome(self) -> Outcome:
        """The comparison of all that was measured."""
        rows = []
        for point in self._points:
            before, after, long_ttft = point["alone_ms"], point["disturbed_ms"], point["long_ttft_ms"]
            ratio = point["p99_ratio"]
            rows.append(
                (
                    point["name"],
                    *(f"{d[k]:.1f}" if d else "" for d in (before, after) for k in ("p50", "p99", "max")),
                    "" if ratio is None else f"{ratio:.2f}",
                    f"{long_ttft['p50']:.0f}" if long_ttft else "",
                )
            )
        series = [Series(name=run.name, points=cdf(self.gaps_ms(run))) for run in self.runs]
        return Outcome(
            runs=self.runs,
            headers=("server", "alone p50", "p99", "max", "disturbed p50", "p99", "max", "p99 ratio", "long TTFT ms"),
            rows=rows,
            findings={"points": self._points, "window_s": list(self.window_s)},
            notes=self._notes,
            plots=[line_plot("Streams' inter-token latency while prompts arrive", "ms", "share of gaps", series)],
        )

    def _requests(self, maker: PromptMaker, first: int, *, disturbed: bool) -> list[PlannedRequest]:
        requests = [
            PlannedRequest(
                index=i,
                token_ids=maker.draw(first + i, self.stream_prompt_tokens),
                output_tokens=self.stream_tokens,
                group=STREAM,
            )
            for i in range(self.streams)
        ]
        if disturbed:
            requests += [
                PlannedRequest(
                    index=self.streams + i,
                    token_ids=maker.draw(first + self.streams + i, self.long_tokens),
                    output_tokens=2,
                    arrival_s=self.period_s * (i + 1),
                    group=LONG,
                )
                for i in range(self.long_count)
            ]
        return requests
