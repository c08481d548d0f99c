"""Which tests one of several test processes gets as a whole, and in which order."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

SHARED_CLUSTERS = frozenset({"one_pair", "two_pairs", "script_b"})
"""Fixtures of tests/process: clusters that take seconds to start, once in each test process that uses them."""

LONGEST = (
    "tests/unit/test_benchmarks.py",
    "tests/component/test_migration_faults.py",
    "tests/component/test_cpu_engine.py",
    "tests/component/test_engine_on_smollm2.py",
    "tests/component/test_handoff_faults_tokens.py",
    "tests/component/test_handoff_faults.py",
    "tests/component/test_structured_output.py",
    "tests/component/test_sampling_features.py",
    "tests/component/test_cpu_quality.py",
    "tests/component/test_cpu_loader.py",
    "tests/unit/test_handoff_model.py",
    "tests/chaos/test_lost_ranks.py",
    "tests/chaos/test_matrix.py",
    "tests/process/test_launch.py",
    "tests/chaos/test_http_fuzz.py",
    "tests/process/test_cpu_exactness.py",
    "tests/process/test_ray.py",
    "tests/process/test_prefix_fetch.py",
    "tests/process/test_takeover.py",
    "tests/process/test_rolling_restart.py",
    "tests/chaos/test_kill.py",
)
"""Modules that take 20 s or more. They come first, so that none of them is all that is left at the end."""

_USE = re.compile(rf"\b({'|'.join(sorted(SHARED_CLUSTERS))}): ProcessCluster\b")


@cache
def whole_of(module: Path) -> str:
    """A name for what stays together: the module, or all modules that use a shared cluster."""
    return "shared clusters" if _USE.search(module.read_text(encoding="utf-8")) else str(module)


def place_of(module: str) -> int:
    """Where tests of this module (as in node ids) come: those of a lower place first."""
    return LONGEST.index(module) if module in LONGEST else len(LONGEST)
