"""`pdserve top`: one worker or 64, a small terminal or none, and nothing that a name could smuggle into it."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from pdserve.cli.top import tokens_per_s, view


def state(num_workers: int, num_requests: int = 3, **more: Any) -> dict[str, Any]:
    worker = {"state": "ready", "running": 2, "waiting": 1, "blocks": {"used": 25, "cached": 5, "total": 100}}
    return {
        "at": 1000.0,
        "router": {"id": "r", "model": "tiny", "version": "0", "state": "ready", "store_available": True},
        "num_requests": num_requests,
        "num_queued": 1,
        "output_tokens_total": 500,
        "workers": [
            {"id": f"w{i}", "role": "decode" if i % 2 else "prefill", "backlog_s": float(i), **worker}
            for i in range(num_workers)
        ],
        "requests": [
            {
                "id": f"q{i}", "state": "DECODING", "attempt": 1 + i, "prefill_worker": "w0", "decode_worker": "w1",
                "prompt_tokens": 10, "output_tokens": i, "age_s": 1.5,
            }
            for i in range(num_requests)
        ],
        "transfers": [],
        "latency": {"ttft": {"p50": 0.1, "p95": 0.2}, "itl": None},
        "events": [{"seq": 0, "at": 999.0, "level": "bad", "text": "w9 is lost"}],
        **more,
    }  # fmt: skip


def shown(found: dict[str, Any], height: int | None = None) -> str:
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(view(found, None, height))
    return capture.get()


def test_everything_an_operator_looks_for_is_there() -> None:
    text = shown(state(2))
    for piece in ("tiny", "queued 1", "decoding 3", "TTFT p50 100.0 p95 200.0 ms", "ITL -", "25/100", "25%", "w0", "q2",
                  "attempt 3", "w9 is lost"):  # fmt: skip
        assert piece in text


@pytest.mark.parametrize("height", [24, 50])
def test_64_workers_fit_into_a_terminal_the_busiest_first_and_all_are_printed_without_one(height: int) -> None:
    everything = shown(state(64))
    assert all(f"w{i} " in everything for i in range(64))
    text = shown(state(64, num_requests=200), height)
    assert len(text.splitlines()) <= height
    assert "w63 " in text and "w2 " not in text
    assert "more, less busy" in text


def test_the_rate_is_that_between_two_looks_or_from_the_routers_history() -> None:
    before = state(1, at=998.0, output_tokens_total=400)
    assert tokens_per_s(state(1), before) == pytest.approx(50.0)
    history = [{"at": 990.0 + i, "output_tokens_total": 400 + i * 10} for i in range(10)]
    assert tokens_per_s(state(1, history=history), None) == pytest.approx((500 - 470) / 3)
    assert tokens_per_s(state(1), None) is None


def test_names_cannot_obey_the_terminal() -> None:
    found = state(1, num_requests=1)
    found["requests"][0]["id"] = "\x1b[2Jgone[bold]"
    text = shown(found)
    assert "\x1b[2J" not in text
    assert "gone[bold]" in text
