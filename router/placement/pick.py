"""The order of scored workers."""

from __future__ import annotations

from collections.abc import Iterable

from router.placement.view import WorkerView


def best_first(scored: Iterable[tuple[float, WorkerView]]) -> list[WorkerView]:
    """Highest score first; equal scores go to the worker that was used longest ago, so that idle workers take turns.

    Deterministic: the same views give the same order, whatever order they come in.
    """
    return [view for _, view in sorted(scored, key=lambda item: (-item[0], item[1].last_used, item[1].key))]
