"""Shows where the time of one request went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from pdserve.client import Generation

BAR_WIDTH = 60

_PHASES: dict[str, tuple[str, str]] = {
    "tokenize": ("t", "magenta"),
    "queue": ("q", "yellow"),
    "prefill": ("P", "cyan"),
    "transfer": ("x", "red"),
    "handover": ("h", "bright_black"),
    "decode": ("d", "green"),
}
"""Phase -> letter (without colours a bar is made of these), colour."""


def bar_cells(values: Sequence[float], width: int) -> list[int]:
    """Cells per value, in proportion, summing to `width` (largest remainder method). All zero for a sum of zero."""
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    exact = [value * width / total for value in values]
    cells = [int(x) for x in exact]
    by_remainder = sorted(range(len(values)), key=lambda i: exact[i] - cells[i], reverse=True)
    for index in by_remainder[: width - sum(cells)]:
        cells[index] += 1
    return cells


def timeline(generation: Generation, *, colour: bool) -> Text:
    """Bar, phases, and the figures people compare; three lines."""
    timings, usage, place = generation.timings, generation.usage, generation.placement
    phases = timings.phases_ms
    text = Text()
    text.append_text(_bar(phases, colour))
    text.append(f"  {timings.e2e_ms:.1f} ms\n")
    for index, (name, value) in enumerate(phases.items()):
        letter, style = _PHASES[name]
        text.append(" + " if index else "")
        text.append(name if colour else f"{name}({letter})", style=style)
        text.append(f" {value:.1f}")
    text.append(f" = {timings.e2e_ms:.1f} ms\n")
    moved = (
        f"KV {place.kv_bytes / 2**20:.2f} MiB by {place.transport}, {place.prefill_worker} to {place.decode_worker}"
        if place.prefill_worker and place.decode_worker
        else f"no KV moved, {place.prefill_worker or place.decode_worker} alone"
    )
    text.append(
        f"TTFT {timings.ttft_ms:.1f} ms, TPOT {timings.tpot_ms:.1f} ms, {usage.prompt_tokens} prompt + "
        f"{usage.completion_tokens} output tokens ({generation.finish_reason}), {moved}"
    )
    return text


def _bar(phases: Mapping[str, float], colour: bool) -> Text:
    bar = Text()
    for (letter, style), cells in zip(
        (_PHASES[name] for name in phases), bar_cells(list(phases.values()), BAR_WIDTH), strict=True
    ):
        bar.append(("█" if colour else letter) * cells, style=style)
    return bar
