"""Techniques together: one of the seeds. All of them, and more techniques, are in tests/chaos."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.engine.cpu.isa import selected_isa
from pdserve.grammar import sequences
from pdserve.testing.combinations import VARIANTS, check_combination

SEED = 13
"""A draft model, outputs of one prompt, grammars, few blocks, and a worker that dies."""


@pytest.mark.skipif(selected_isa() is None, reason="the CPU engine does not run on this CPU")
async def test_everything_at_once_gives_what_plain_decoding_gives(
    redis_url: str, cluster_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-PRE-2, O-REC-1, with drafts."""
    monkeypatch.setattr(sequences, "MAX_WAIT_FOR_DRAFT_S", 10.0)
    outcome = await check_combination(redis_url, cluster_name, tmp_path / "model", VARIANTS["plain"], SEED)
    assert outcome.num_attempts > 1, "a worker was killed"
