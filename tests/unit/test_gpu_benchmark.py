"""The parts of `benchmarks/gpu.py` run, on a model so small that a CPU does: figures have values, in all units."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.harness.report import Report
from benchmarks.on_gpu.figures import PARTS, Sizes, names
from benchmarks.on_gpu.main import run
from benchmarks.on_gpu.parts import PARTS as MEASURE
from benchmarks.on_gpu.rig import SHAPES, GpuRig, Model
from pdserve.engine.attention import SdpaAttention
from pdserve.testing.eager_recorder import EagerRecorder

SIZES = Sizes(
    decode=((2, 20),),
    prefill=(24,),
    graphs=((1, 18),),
    handover_blocks=2,
    repeats=1,
    roof_nbytes=1 << 20,
    roof_matrix=16,
)


class Cpu:
    """Implements `Device`."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Work is complete when it was submitted."""

    def recorder(self) -> EagerRecorder:
        return EagerRecorder()


@pytest.fixture(scope="module")
def rig() -> GpuRig:
    config = replace(
        SHAPES["1b"],
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
    )
    model = Model.random(config, torch.float32, torch.device("cpu"))
    return GpuRig(model, SdpaAttention(), Cpu(), num_blocks=SIZES.num_blocks, dtype="float32", graph_tokens=2)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_gives_the_figures_that_it_names(rig: GpuRig, part: str) -> None:
    report = Report(benchmark="gpu", settings={})
    MEASURE[part](rig, SIZES, report)
    assert [figure.name for figure in report.figures] == names(part, SIZES)
    for figure in report.figures:
        # This attention backend cannot be captured.
        assert (figure.value is None) == (part == "graphs") and (figure.value is None or figure.value > 0)


def test_without_a_gpu_every_figure_is_there_with_the_reason_and_no_value() -> None:
    report = Report(benchmark="gpu", settings={})
    run(report, list(PARTS), quick=False, obstacle="not measured: no GPU")
    assert [figure.name for figure in report.figures] == [name for part in PARTS for name in names(part, Sizes())]
    assert all(figure.value is None and figure.note == "not measured: no GPU" for figure in report.figures)
