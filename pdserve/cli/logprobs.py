"""Shows the log-probabilities of a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from pdserve.client import TokenLogprobs


def logprob_table(title: str, tokens: Sequence[TokenLogprobs], text_of: Callable[[int], str]) -> Table:
    """One line a token: its text, its log-probability, and the most likely tokens at its place."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("token", no_wrap=True)
    table.add_column("id", justify="right")
    table.add_column("logprob", justify="right")
    if any(token.top for token in tokens):
        table.add_column("most likely")
    for token in tokens:
        # Text and not markup: tokens may hold brackets.
        cells: list[Text | str] = [Text(repr(text_of(token.token_id))), str(token.token_id), f"{token.logprob:.3f}"]
        if token.top:
            cells.append(Text("  ".join(f"{text_of(i)!r} {value:.3f}" for i, value in token.top)))
        table.add_row(*cells)
    return table


def logprob_records(tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "token_id": token.token_id,
            "logprob": token.logprob,
            "top": [{"token_id": token_id, "logprob": value} for token_id, value in token.top],
        }
        for token in tokens
    ]
