"""Cost models: they find what measurements follow, whatever the units, and stay sane with measurements that are not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from router.cost import NUM_SIZES, Backlog, OnlineFit, PrefillModel, StepModel, TransferModel, size_of

Truth = Callable[[int, int], float]


def prefill_time(a: float, b: float, c: float) -> Truth:
    return lambda n, h: a + b * (n - h) + c * (n * n - h * h)


# Of workloads that others have measured: an 8B model on an H200, 13B on an A100, and a small model on two CPU cores.
PREFILLS = [
    prefill_time(4.57e-3, 1.684e-5, 7.27e-10),
    prefill_time(22e-3, 1.405e-4, 8.08e-9),
    prefill_time(2e-3, 2e-3, 1e-7),
]


def prompts(rng: random.Random, count: int) -> list[tuple[int, int]]:
    lengths = [int(math.exp(rng.uniform(math.log(50), math.log(30_000)))) for _ in range(count)]
    return [(n, rng.choice((0, 0, rng.randrange(n)))) for n in lengths]


@pytest.mark.parametrize("truth", PREFILLS)
def test_prefill_model_predicts_within_a_few_percent_after_some_prompts(truth: Truth) -> None:
    rng = random.Random(1)
    model = PrefillModel()
    for n, h in prompts(rng, 100):
        model.add(n, h, truth(n, h) * rng.uniform(0.95, 1.05))
    for n, h in ((100, 0), (1000, 0), (1000, 900), (8000, 4000), (30_000, 0)):
        assert model.predict(n, h) == pytest.approx(truth(n, h), rel=0.1), (n, h)


@pytest.mark.parametrize("truth", PREFILLS)
def test_one_measurement_tells_how_fast_a_worker_is(truth: Truth) -> None:
    model = PrefillModel()
    model.add(2000, 0, truth(2000, 0))
    assert model.predict(2000, 0) == pytest.approx(truth(2000, 0), rel=0.01)
    assert model.predict(1000, 0) == pytest.approx(truth(1000, 0), rel=0.5)


def test_prompts_of_one_length_do_not_make_others_absurd() -> None:
    rng = random.Random(9)
    truth, model = PREFILLS[0], PrefillModel()
    for _ in range(200):
        n = rng.randrange(950, 1050)
        model.add(n, 0, truth(n, 0) * rng.uniform(0.9, 1.1))
    assert model.predict(10, 0) < model.predict(500, 0) < model.predict(1000, 0) < model.predict(10_000, 0)
    assert model.predict(10_000, 0) < 30 * truth(10_000, 0)


def test_measurements_that_are_far_off_hardly_count() -> None:
    rng = random.Random(2)
    truth, model = PREFILLS[1], PrefillModel()
    for number, (n, h) in enumerate(prompts(rng, 300)):
        # Every twelfth prompt: the process was stopped for a while.
        model.add(n, h, truth(n, h) + (20.0 if number % 12 == 5 else 0.0))
    for n, h in ((200, 0), (2000, 0), (20_000, 0)):
        assert model.predict(n, h) == pytest.approx(truth(n, h), rel=0.35), (n, h)


def test_a_first_prompt_that_compiles_something_is_forgotten_at_once() -> None:
    truth, model = PREFILLS[1], PrefillModel()
    model.add(500, 0, 30.0)
    for _ in range(2):
        model.add(500, 0, truth(500, 0))
        assert model.predict(500, 0) == pytest.approx(truth(500, 0), rel=0.05)
    for n, h in prompts(random.Random(10), 30):
        model.add(n, h, truth(n, h))
    assert model.predict(2000, 0) == pytest.approx(truth(2000, 0), rel=0.1)


def test_a_worker_that_has_become_slower_is_known_to_be() -> None:
    rng = random.Random(3)
    truth, model = PREFILLS[1], PrefillModel()
    for n, h in prompts(rng, 200):
        model.add(n, h, truth(n, h))
    for n, h in prompts(rng, 200):
        model.add(n, h, 3 * truth(n, h))
    assert model.predict(5000, 0) == pytest.approx(3 * truth(5000, 0), rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_measured_no_prediction_is_negative(seed: int) -> None:
    rng = random.Random(seed)
    model = PrefillModel()
    for n, h in prompts(rng, 200):
        model.add(n, h, rng.choice((rng.expovariate(1.0), 0.0, -1.0, math.nan, math.inf)))
        assert all(math.isfinite(value) and value >= 0.0 for value in model.coefficients)
        assert sum(model.coefficients) > 0.0


def test_what_cannot_have_been_measured_changes_nothing() -> None:
    model = PrefillModel()
    before = model.coefficients
    for duration_s in (0.0, -1.0, math.nan, math.inf):
        model.add(100, 0, duration_s)
    assert (model.coefficients, model.num_observations) == (before, 0)


def idle_step_model() -> StepModel:
    """Of steps that take nothing but what their sequences take: one without any is predicted to take no time."""
    model = StepModel()
    for number in range(100):
        num_sequences = 1 + number % 10
        # More than in proportion, so that the fixed part would be negative.
        model.add(100 * num_sequences, num_sequences, 1e-4 * num_sequences**1.5)
    assert model.coefficients[0] == 0.0
    assert model.predict(0, 0) == 0.0
    return model


def test_what_was_predicted_to_take_no_time_says_nothing_of_a_change() -> None:
    model = idle_step_model()
    for _ in range(10):
        model.add(0, 0, 0.02)
    assert 0.0 < model.predict(500, 5) < 0.1


def test_a_change_is_found_although_one_of_its_measurements_says_nothing_by_then() -> None:
    """What is noted of a run is fitted too, and a fit may take the last of a prediction away."""
    fit = OnlineFit((1.0, 1.0))
    for _ in range(50):
        fit.add((1.0, 1.0), 2.0)
    fit._run = [((1.0, 0.0), 9.0), *[((1.0, 1.0), 20.0)] * 3]
    fit._coefficients = (0.0, 2.0)
    fit._begin_again()
    assert fit.predict((1.0, 1.0)) > 8.0


def test_at_least_the_last_token_is_computed() -> None:
    model = PrefillModel()
    assert model.predict(1000, 1000) == model.predict(1000, 999) > 0


def test_transfer_model_finds_bandwidth_and_fixed_part() -> None:
    rng = random.Random(5)
    model = TransferModel()
    for _ in range(100):
        nbytes = rng.randrange(1 << 16, 1 << 28)
        model.add(nbytes, (0.004 + nbytes / 12e9) * rng.uniform(0.9, 1.1))
    fixed_s, byte_s = model.coefficients
    assert fixed_s == pytest.approx(0.004, rel=0.25)
    assert 1 / byte_s == pytest.approx(12e9, rel=0.2)


def test_step_model_finds_what_tokens_and_sequences_cost() -> None:
    rng = random.Random(6)
    model = StepModel()
    for _ in range(200):
        sequences = rng.randrange(1, 128)
        tokens = sequences * rng.randrange(100, 4000)
        model.add(tokens, sequences, 5.06e-3 + 3.28e-8 * tokens + 1.32e-5 * sequences)
    for tokens, sequences in ((1000, 1), (60_000, 60), (400_000, 120)):
        truth = 5.06e-3 + 3.28e-8 * tokens + 1.32e-5 * sequences
        assert model.predict(tokens, sequences) == pytest.approx(truth, rel=0.03)


def test_fit_of_what_falls_leaves_the_falling_part_out() -> None:
    fit = OnlineFit((1.0, 1.0))
    for x in range(1, 50):
        fit.add((1.0, float(x)), 10.0 - 0.1 * x)
    constant, slope = fit.coefficients
    assert slope == 0.0
    assert 5.1 < constant < 9.9, "a mean of what was seen"


@pytest.mark.parametrize(
    ("num_tokens", "size"),
    [(1, 0), (2, 1), (3, 1), (4, 2), (1023, 9), (1024, 10), (2**23, 23), (2**40, NUM_SIZES - 1)],
)
def test_size(num_tokens: int, size: int) -> None:
    assert size_of(num_tokens) == size


def test_backlog_is_what_was_put_in_and_not_taken_out() -> None:
    rng = random.Random(8)
    backlog = Backlog()
    waiting: list[tuple[int, float]] = []
    for _ in range(2000):
        if waiting and rng.random() < 0.5:
            backlog.remove(*waiting.pop(rng.randrange(len(waiting))))
        else:
            waiting.append((rng.randrange(1, 100_000), rng.random()))
            backlog.add(*waiting[-1])
        assert backlog.num_tokens == sum(n for n, _ in waiting)
    waits = backlog.waits(0.5)
    for size in range(NUM_SIZES):
        in_front = sum(seconds for n, seconds in waiting if size_of(n) <= size)
        longer = sum(seconds for n, seconds in waiting if size_of(n) > size)
        step = sum(seconds for _, seconds in waiting) * 512 / backlog.num_tokens
        assert waits[size] == pytest.approx(0.5 + in_front + min(longer, step))
    for prompt in waiting:
        backlog.remove(*prompt)
    assert backlog.waits() == (0.0,) * NUM_SIZES, "no rounding is left behind"
