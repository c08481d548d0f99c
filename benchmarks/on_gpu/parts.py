"""What is measured, and the roofs it is measured against, which are measured as well."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.harness.report import Report
from benchmarks.on_gpu.figures import BLOCK_SIZE, Sizes
from benchmarks.on_gpu.rig import GpuRig
from pdserve.engine.torch_engine import TorchEngine

NO_CAPTURE = "attention cannot be captured"


Part = Callable[[GpuRig, Sizes, Report], None]


def decode(rig: GpuRig, sizes: Sizes, report: Report) -> None:
    """Decode steps against the time that reading weights and KV takes."""
    buffer = torch.zeros(sizes.roof_nbytes // 4, dtype=torch.float32, device=rig.on.device)
    bandwidth = sizes.roof_nbytes / min(rig.times(buffer.sum, sizes.repeats))
    del buffer
    report.add("read_bandwidth", bandwidth / 1e9, "GB/s", note=f"sum of {sizes.roof_nbytes >> 20} MiB")
    element = rig.model.weights.embedding.element_size()
    weights = (rig.model.layer_elements + rig.model.head_elements) * element
    engine = rig.graphed or rig.eager
    for batch, context in sizes.decode:
        times = rig.step_times(engine, rig.decode_batch(batch, context), sizes.repeats)
        nbytes = weights + batch * context * rig.pool.layout.block_nbytes // BLOCK_SIZE
        step = statistics.median(times)
        name = f"decode_{batch}x{context}"
        report.samples[name] = times
        report.add(
            f"{name}_over_read_bound", step * bandwidth / nbytes, "ratio",
            note=f"{step * 1e3:.2f} ms a step, {batch / step:.0f} tokens/s, {nbytes / 1e9:.2f} GB to read",
        )  # fmt: skip


def prefill(rig: GpuRig, sizes: Sizes, report: Report) -> None:
    """Prompts against what the matrix units do with one large product."""
    n = sizes.roof_matrix
    weight = rig.model.weights.embedding
    left, right = (torch.randn((n, n), device=weight.device).to(weight.dtype) for _ in range(2))
    peak = 2 * n**3 / min(rig.times(lambda: left @ right, sizes.repeats))
    report.add("matrix_peak", peak / 1e12, "TFLOP/s", note=f"{n} x {n} times {n} x {n}, {weight.dtype}")
    config = rig.model.config
    for length in sizes.prefill:
        times = rig.step_times(rig.eager, rig.prefill_batch(length), sizes.repeats)
        # Two operations for a product and its sum; causal attention sees half of all pairs, for scores and for values.
        flop = 2 * (rig.model.layer_elements * length + rig.model.head_elements)
        flop += 2 * config.num_layers * config.q_size * length**2
        step = statistics.median(times)
        report.samples[f"prefill_{length}"] = times
        report.add(
            f"prefill_{length}_of_matrix_peak", flop / step / peak, "ratio",
            note=f"{step * 1e3:.1f} ms, {length / step:.0f} tokens/s, {flop / step / 1e12:.1f} TFLOP/s",
        )  # fmt: skip


def graphs(rig: GpuRig, sizes: Sizes, report: Report) -> None:
    """The same decode steps in graphs and eagerly, in turns."""
    for batch, context in sizes.graphs:
        name = f"eager_over_graph_{batch}x{context}"
        if rig.graphed is None:
            report.add(name, None, "ratio", note=NO_CAPTURE)
            continue
        packed = rig.decode_batch(batch, context)
        times: dict[str, list[float]] = {"eager": [], "graph": []}
        engines: dict[str, TorchEngine] = {"eager": rig.eager, "graph": rig.graphed}
        for _ in range(4):
            for kind, engine in engines.items():
                times[kind] += rig.step_times(engine, packed, max(1, sizes.repeats // 4))
        eager, graph = (statistics.median(times[kind]) for kind in engines)
        report.samples[name] = times
        report.add(name, eager / graph, "ratio", note=f"{eager * 1e3:.2f} against {graph * 1e3:.2f} ms")


def handover(rig: GpuRig, sizes: Sizes, report: Report) -> None:
    """KV off the device and on it again, as a transport does it, against bare copies of as many bytes."""
    store, count = rig.eager.store, sizes.handover_blocks
    blocks, others = list(range(0, 2 * count, 2)), list(range(1, 2 * count, 2))
    layers = rig.model.config.num_layers
    nbytes = count * rig.pool.layout.block_nbytes
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=rig.on.device.type == "cuda")
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=rig.on.device)
    data = memoryview(b"".join(store.read(blocks, 0, layers)))
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "read": (lambda: store.read(blocks, 0, layers), lambda: host.copy_(on_device)),
        "write": (lambda: store.write(others, 0, layers, data), lambda: on_device.copy_(host)),
    }
    for name, (ours, bare) in ways.items():
        our_times, bare_times = rig.times(ours, sizes.repeats), rig.times(bare, sizes.repeats)
        report.samples[f"handover_{name}"] = {"ours": our_times, "copy": bare_times}
        ours_s, bare_s = statistics.median(our_times), statistics.median(bare_times)
        report.add(
            f"handover_{name}_over_copy", bare_s / ours_s, "ratio",
            note=f"{nbytes / ours_s / 1e9:.2f} GB/s of {nbytes / bare_s / 1e9:.2f}, {count} blocks, {nbytes >> 20} MiB",
        )  # fmt: skip


PARTS: dict[str, Part] = {"decode": decode, "prefill": prefill, "graphs": graphs, "handover": handover}
