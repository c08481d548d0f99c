"""Figures of `pdserve bench`, against numpy and arithmetic by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.bench.arrivals import gamma_arrivals, poisson_arrivals, replayed_arrivals
from pdserve.bench.experiments.decode_scaling import Steady
from pdserve.bench.experiments.goodput import GoodputSearch
from pdserve.bench.fit import Quadratic
from pdserve.bench.requests import PHASES, Answer, PlannedRequest, RequestRecord
from pdserve.bench.roofline import ModelWork
from pdserve.bench.run import RunResult
from pdserve.bench.statistics import Distribution, Slo, summarize
from pdserve.errors import InvalidRequestError
from pdserve.model.config import ModelConfig


def record(
    due: float, tokens: list[float], *, sent: float | None = None, error: str | None = None, warmup: bool = False,
    answer: Answer | None = None,
) -> RequestRecord:  # fmt: skip
    request = PlannedRequest(index=0, token_ids=(1, 2, 3, 4), output_tokens=len(tokens), warmup=warmup)
    return RequestRecord(
        request=request,
        due_s=due,
        sent_s=due if sent is None else sent,
        token_times_s=tokens,
        ended_s=tokens[-1] if tokens else due + 1,
        error=error,
        answer=answer or Answer(),
    )


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=200))
def test_percentiles_are_those_of_numpy(samples: list[float]) -> None:
    got = Distribution.of(samples)
    assert got is not None
    want = np.percentile(samples, [50, 90, 99])
    assert [got.p50, got.p90, got.p99, got.max] == pytest.approx([*want, max(samples)])
    assert got.mean == pytest.approx(np.mean(samples)) and got.count == len(samples)


def test_latencies_follow_their_definitions() -> None:
    got = summarize([record(1.0, [1.5, 1.6, 1.9], sent=1.2)])
    assert got.ttft_ms is not None and got.ttft_ms.p50 == pytest.approx(500)  # from when it was due, not from 1.2
    assert got.tpot_ms is not None and got.tpot_ms.p50 == pytest.approx(200)
    assert got.itl_ms is not None and (got.itl_ms.count, got.itl_ms.max) == (2, pytest.approx(300))
    assert got.late_ms is not None and got.late_ms.p50 == pytest.approx(200)
    assert got.output_tokens_per_s == pytest.approx(3 / 0.9)


def test_one_token_has_no_tpot() -> None:
    got = summarize([record(0.0, [0.5])], Slo(ttft_s=1.0, tpot_s=0.01))
    assert got.tpot_ms is None and got.attainment is not None and got.attainment.joint == 1.0


def test_failures_count_in_attainment_and_errors_but_not_in_latencies() -> None:
    records = [
        record(0.0, [0.1, 0.2]),
        record(0.0, [5.0, 9.0], error="unavailable"),
        record(0.0, [], error="http_error"),
    ]
    got = summarize(records, Slo(ttft_s=1.0, tpot_s=1.0))
    assert (got.num_requests, got.num_ok, got.errors) == (3, 1, {"unavailable": 1, "http_error": 1})
    assert got.ttft_ms is not None and got.ttft_ms.count == 1
    assert got.attainment is not None and got.attainment.joint == pytest.approx(1 / 3)


def test_joint_attainment_needs_both_of_one_request() -> None:
    fast_start, fast_tokens = record(0.0, [0.1, 1.1]), record(0.0, [2.0, 2.01])
    got = summarize([fast_start, fast_tokens], Slo(ttft_s=0.5, tpot_s=0.5)).attainment
    assert got is not None and (got.ttft, got.tpot, got.joint, got.goodput_rps) == (0.5, 0.5, 0.0, 0.0)


def test_warm_up_is_in_no_figure() -> None:
    got = summarize([record(0.0, [9.0, 9.5], warmup=True), record(10.0, [10.1, 10.2])])
    assert (got.num_requests, got.duration_s) == (1, pytest.approx(0.2))


def test_phases_sum_to_what_the_client_saw() -> None:
    phases = {"tokenize": 1.0, "queue": 20.0, "prefill": 300.0, "transfer": 4.0, "handover": 5.0, "decode": 100.0}
    one = record(1.0, [1.5, 1.6], sent=1.05, answer=Answer(phases_ms=phases))
    assert tuple(one.phases_s) == PHASES
    assert sum(one.phases_s.values()) == pytest.approx(one.e2e_s)
    assert one.phases_s["late"] == pytest.approx(0.05) and one.phases_s["outside"] == pytest.approx(0.12)


@given(st.integers(0, 2**32), st.floats(0.2, 50), st.sampled_from([0.25, 1.0, 4.0]))
@settings(max_examples=25, deadline=None)
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(seed: int, rate: float, burstiness: float) -> None:
    times = gamma_arrivals(20_000, rate, burstiness=burstiness, seed=seed)
    gaps = np.diff([0.0, *times])
    # Six standard errors: of the mean, and of the deviation of so heavy a tail.
    assert gaps.mean() * rate == pytest.approx(1.0, abs=6 / np.sqrt(20_000 * burstiness))
    assert gaps.std() * rate == pytest.approx(burstiness**-0.5, rel=0.25)
    assert (gaps >= 0).all()
    assert times == gamma_arrivals(20_000, rate, burstiness=burstiness, seed=seed)
    assert times != gamma_arrivals(20_000, rate, burstiness=burstiness, seed=seed + 1)


def test_another_rate_stretches_the_same_arrivals() -> None:
    slow, fast = poisson_arrivals(50, 1.0, seed=3), poisson_arrivals(50, 4.0, seed=3)
    assert slow == pytest.approx([4 * t for t in fast])


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=50), st.floats(0.1, 10), st.floats(0, 5))
def test_replayed_arrivals_begin_at_zero_in_order_within_the_jitter(
    recorded: list[float], speed: float, jitter: float
) -> None:
    times = replayed_arrivals(recorded, speed=speed, jitter_s=jitter, seed=1)
    assert times[0] == 0.0 and times == sorted(times)
    spread = (max(recorded) - min(recorded)) / speed
    assert spread - jitter / speed - 1e-6 <= times[-1] <= spread + jitter / speed + 1e-6


def test_jitter_breaks_up_ticks() -> None:
    ticks = [0.0] * 10 + [3.0] * 10
    assert len(set(replayed_arrivals(ticks, speed=1, jitter_s=0, seed=0))) == 2
    assert len(set(replayed_arrivals(ticks, speed=1, jitter_s=3, seed=0))) == 20


def test_impossible_arrivals_are_refused() -> None:
    for rate, burstiness in ((0, 1), (1, 0)):
        with pytest.raises(InvalidRequestError, match="above 0"):
            gamma_arrivals(3, rate, burstiness=burstiness, seed=0)


def test_the_fit_finds_the_parabola_it_was_made_of() -> None:
    n = [16.0, 64, 256, 512, 1024, 2048]
    got = Quadratic.fit(n, [5 + 0.3 * x + 2e-4 * x * x for x in n])
    assert got is not None
    assert (got.a, got.b, got.c) == pytest.approx((5, 0.3, 2e-4), rel=1e-6) and got.r_squared == pytest.approx(1)
    assert Quadratic.fit([1, 2, 2], [1, 2, 2]) is None


def test_steady_decode_counts_only_while_all_streams_run() -> None:
    early = record(0.0, [0.1 * i for i in range(1, 11)])
    late = record(0.0, [0.55 + 0.1 * i for i in range(1, 11)])
    got = Steady.of([early, late])
    assert got is not None and got.step_s == pytest.approx(0.1)
    assert got.tokens_per_step == pytest.approx(2.0)
    assert Steady.of([record(0, [1.0, 1.1]), record(0, [2.0, 2.1])]) is None


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3])
async def test_goodput_search_closes_in_on_the_capacity(capacity: float) -> None:
    calls = itertools.count()

    async def run_at(rate: float) -> RunResult:
        next(calls)
        ttft = 0.1 if rate <= capacity else 2.0
        records = [record(float(i), [i + ttft, i + ttft + 0.01]) for i in range(10)]
        return RunResult(
            name="x", target="x", records=records, queues=[], summary=summarize(records, Slo(ttft_s=1.0, tpot_s=1.0))
        )  # fmt: skip

    search = GoodputSearch(attainment=0.9, start_rate=1.0, tolerance=0.05)
    found = await search.add("one", run_at)
    assert capacity / 1.05 <= found <= capacity
    assert next(calls) <= 16
    assert search.outcome().findings["layouts"][0]["max_rate"] == found


def test_work_of_a_model_is_counted_by_hand() -> None:
    config = ModelConfig(
        architecture="llama", vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=4, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=None, eos_token_ids=(0,),
    )  # fmt: skip
    # q 8x8, k and v 8x4 each, o 8x8; three matrices 8x16; head 100x8.
    layer, head = 64 + 32 + 32 + 64 + 3 * 128, 800
    work = ModelWork(config, weight_nbytes=1000)
    one = work.decode(1, 10)
    assert one.flop == 2 * (2 * layer + head) + 4 * 2 * 8 * 10
    assert one.nbytes == 1000 + 2 * 2 * 2 * 4 * 11
    assert work.decode(8, 10).intensity > one.intensity
    assert work.prefill(1).flop == 2 * (2 * layer + head) + 4 * 2 * 8
