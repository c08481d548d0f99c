"""When requests of an open loop are due: seconds from the start, never falling. Everything follows from the seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdserve.errors import InvalidRequestError


def gamma_arrivals(count: int, rate: float, *, burstiness: float, seed: int) -> list[float]:
    """Gaps of a gamma distribution with mean 1/rate and a coefficient of variation of 1/sqrt(burstiness).

    `burstiness` 1 is a Poisson process, less comes in bursts, more is steadier (the shape parameter, as in vLLM's and
    SGLang's clients). Raises InvalidRequestError.
    """
    if rate <= 0:
        raise InvalidRequestError(f"rate: must be above 0 requests per second, got {rate:g}", field="rate")
    if burstiness <= 0:
        raise InvalidRequestError(f"burstiness: must be above 0, got {burstiness:g}", field="burstiness")
    random = np.random.default_rng(seed)
    gaps = random.gamma(burstiness, 1.0 / (rate * burstiness), count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def poisson_arrivals(count: int, rate: float, *, seed: int) -> list[float]:
    """A Poisson process. Raises InvalidRequestError."""
    return gamma_arrivals(count, rate, burstiness=1.0, seed=seed)


def replayed_arrivals(recorded_s: Sequence[float], *, speed: float, jitter_s: float, seed: int) -> list[float]:
    """Recorded times, `speed` times as fast, beginning at 0.

    `jitter_s` spreads each evenly over so many seconds of the record after its time: some traces were written in ticks
    (3 s in Mooncake's), and as they are would come in batches. The order may change, so the result is sorted. Raises
    InvalidRequestError.
    """
    if speed <= 0:
        raise InvalidRequestError(f"speed: must be above 0, got {speed:g}", field="speed")
    if jitter_s < 0:
        raise InvalidRequestError(f"jitter: must not be negative, got {jitter_s:g}", field="jitter")
    random = np.random.default_rng(seed)
    times = np.asarray(recorded_s, float)
    times = times + random.uniform(0.0, jitter_s, len(times)) if jitter_s else times
    times = np.sort(times)
    spread: list[float] = ((times - times[:1]) / speed).tolist()
    return spread
