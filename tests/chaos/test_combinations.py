"""Techniques together, by a fixed list of seeds. Only selected by its mark; tests/component has one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.engine.cpu.isa import selected_isa
from pdserve.grammar import sequences
from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.combinations import VARIANTS, check_combination

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(selected_isa() is None, reason="the CPU engine does not run on this CPU"),
]

SEEDS = range(18)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", SEEDS)
async def test_everything_at_once_gives_what_plain_decoding_gives(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    """O-PRE-2, O-REC-1, with drafts."""
    monkeypatch.setattr(sequences, "MAX_WAIT_FOR_DRAFT_S", 10.0)
    await check_combination(redis_url, f"all-{name}-{seed}", tmp_path / "model", VARIANTS[name], seed)
