"""Whatever reads bytes of somebody else says what is wrong with them, or reads them, and does nothing else.

The plain run lets hypothesis look for a few hundred cases. Selected by its mark (`pytest -m chaos`) it has three tenths
of PDSERVE_FUZZ_CASES (100,000).
"""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.testing.fuzz_parsers import PARSERS, Parser

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

SHARE = 0.3


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_parser_raises_nothing_but_what_it_says(parser: Parser, pytestconfig: pytest.Config) -> None:
    """O-VAL-1, O-KV-5, O-SEC."""
    if pytestconfig.option.markexpr == "chaos":
        seed, cases = int(os.environ.get("PDSERVE_FUZZ_SEED", "1")), int(os.environ.get("PDSERVE_FUZZ_CASES", "100000"))
        rng = Random(seed)
        for _ in range(int(SHARE * cases / len(PARSERS))):
            parser.feed(rng)
        return

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def search(rng: Random) -> None:
        parser.feed(rng)

    search()
