"""What the benchmark makes of requests that met an SLO at several rates."""

from __future__ import annotations

import pytest

from benchmarks.whole_system.goodput import LAYOUTS, MIXES, GoodputGrid, Point, goodput, over
from pdserve.bench.statistics import Slo


def point(rate: float, num_met: int, num_requests: int = 20) -> Point:
    return Point(
        rate=rate,
        num_requests=num_requests,
        num_met=num_met,
        ttft=1.0,
        tpot=1.0,
        ttft_p90_ms=None,
        tpot_p90_ms=None,
        local=0.0,
        errors={},
    )


@pytest.mark.parametrize(
    ("met", "rate"),
    [
        ((20, 20, 20), 3.0),
        ((20, 18, 16), 2.0),
        ((20, 20, 16), 2.5),
        ((20, 16, 20), 1.5),
        ((10, 10, 10), 0.2),
        ((0, 0, 0), 0.0),
    ],
    ids=["never too much", "just enough at 2", "between 2 and 3", "first failure counts", "below all", "nothing"],
)
def test_goodput_lies_between_the_rates_that_were_tried(met: tuple[int, ...], rate: float) -> None:
    assert goodput([point(float(number), num) for number, num in enumerate(met, 1)]) == pytest.approx(rate)


def test_one_over_the_best_of_the_others() -> None:
    assert over({"a": 3.0, "b": 2.0, "c": 4.0}, "a", "b", "c") == 0.75
    assert over({"a": 3.0, "b": 0.0}, "a", "b") is None


def test_layouts_are_compared_by_all_requests_that_met_both() -> None:
    grid = GoodputGrid(
        Slo(ttft_s=1.5, tpot_s=0.04), loads=(0.5, 0.8), run_s=1.0, prompt_token_s=1.0, output_token_s=1.0
    )
    for layout, met in zip(LAYOUTS, (3, 4, 5), strict=True):
        grid.points["mixed", layout] = [point(1.0, met), point(2.0, 2 * met)]
    assert grid.met("mixed") == dict(zip(LAYOUTS, (9, 12, 15), strict=True))
    assert "conditional 25/50 %" in grid.note("mixed")
    assert [mix.work_s(1e-3, 1e-2) for mix in MIXES] == pytest.approx([1.216, 1.136, 1.392])
