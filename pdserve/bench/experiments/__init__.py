"""Experiments of several runs, each with the figures and plots that are its point."""

from pdserve.bench.experiments.decode_scaling import decode_scaling
from pdserve.bench.experiments.goodput import GoodputSearch
from pdserve.bench.experiments.interference import Interference
from pdserve.bench.experiments.outcome import Outcome
from pdserve.bench.experiments.prefill_scaling import prefill_scaling

__all__ = ["GoodputSearch", "Interference", "Outcome", "decode_scaling", "prefill_scaling"]
