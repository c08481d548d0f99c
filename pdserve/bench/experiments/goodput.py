"""The largest rate of arrivals at which enough requests meet an SLO: doubling until it fails, then bisection.

As in DistServe and Vidur. Arrivals of each rate are the same random numbers stretched, so that two rates differ in
nothing else; with N requests, an attainment near 90 % is known to about 2 x sqrt(0.09 / N) only.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from pdserve.bench.experiments.outcome import Outcome
from pdserve.bench.run import RunResult
from pdserve.bench.svg import Series, line_plot

RunAt = Callable[[float], Awaitable[RunResult]]
"""One run at so many requests per second, with an SLO."""


@dataclass(slots=True, kw_only=True)
class GoodputSearch:
    """Searches one layout after the other."""

    attainment: float
    """Share of requests that have to meet both bounds."""
    start_rate: float
    tolerance: float
    """Ends when the rates that passed and failed differ by no more than this share."""
    max_runs: int = 16
    runs: list[RunResult] = field(default_factory=list)
    _found: list[dict[str, Any]] = field(default_factory=list)

    async def add(self, name: str, run_at: RunAt) -> float:
        """Search, and return the largest rate that passed; 0 if none did in `max_runs` runs."""
        passed, failed, rate = 0.0, math.inf, self.start_rate
        tried: list[dict[str, Any]] = []
        while len(tried) < self.max_runs and not (passed > 0 and failed <= passed * (1 + self.tolerance)):
            run = await run_at(rate)
            self.runs.append(run)
            got = run.summary.attainment
            assert got is not None, "the search needs runs with an SLO"
            tried.append({"rate": rate, "joint": got.joint, "ttft": got.ttft, "tpot": got.tpot})
            if got.joint >= self.attainment:
                passed = max(passed, rate)
            else:
                failed = min(failed, rate)
            if math.isinf(failed):
                rate *= 2
            elif passed == 0:
                rate /= 2
            else:
                rate = (passed + failed) / 2
        self._found.append(
            {
                "name": name,
                "max_rate": passed,
                "failed_rate": None if math.isinf(failed) else failed,
                "runs": sorted(tried, key=lambda t: float(t["rate"])),
            }
        )
        return passed

    def outcome(self) -> Outcome:
        """All layouts together."""
        rows: list[tuple[str, ...]] = [
            (
                found["name"],
                f"{found['max_rate']:.3f}",
                "" if found["failed_rate"] is None else f"{found['failed_rate']:.3f}",
                str(len(found["runs"])),
            )
            for found in self._found
        ]
        series = [
            Series(name=found["name"], points=[(t["rate"], 100 * t["joint"]) for t in found["runs"]])
            for found in self._found
        ]
        best = max(self._found, key=lambda found: float(found["max_rate"]), default=None)
        slo = self.runs[0].summary.attainment
        assert slo is not None
        return Outcome(
            runs=self.runs,
            headers=("server", "max req/s", "failed at", "runs"),
            rows=rows,
            findings={"layouts": self._found, "attainment": self.attainment, "slo": asdict(slo.slo)},
            notes=[] if best is None else [f"largest rate at the SLO: {best['name']}, {best['max_rate']:.3f} req/s"],
            plots=[
                line_plot("SLO attainment by rate", "requests/s", "% met both", series, limit=100 * self.attainment)
            ],
        )
