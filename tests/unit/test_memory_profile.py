"""How much of a GPU becomes KV pool, on a device that exists only as numbers."""

from __future__ import annotations

import pytest

from pdserve.engine.memory_profile import MemoryProfile, MemoryProfiler
from pdserve.errors import ConfigError
from pdserve.testing.fake_memory import FakeMemory


def profile() -> MemoryProfile:
    """Weights of 20 whose loading took 30; a step that takes 15, and lets libraries take 3 more."""
    memory = FakeMemory()
    memory.cached = 7
    profiler = MemoryProfiler(memory)
    memory.use(30)
    memory.use(-10)
    memory.cached = 10

    def largest_step() -> None:
        memory.use(15)
        memory.use(-15)
        memory.cached = 15
        memory.libraries += 3

    return profiler.measure(largest_step)


def test_what_takes_memory_is_told_apart() -> None:
    assert profile() == MemoryProfile(total=100, free=65, weights=20, step=15, libraries=3)


def test_the_pool_gets_what_the_fraction_leaves() -> None:
    assert profile().pool_nbytes(0.8) == 80 - 20 - 15 - 3


def test_the_pool_never_gets_what_other_processes_have() -> None:
    assert profile().pool_nbytes(1.0) == 65 - 15


def test_too_small_a_fraction_is_refused_with_the_account() -> None:
    with pytest.raises(
        ConfigError, match=r"gpu_memory_fraction: 0.3 of .* leaves no room for KV: weights take"
    ) as info:
        profile().pool_nbytes(0.3)
    assert info.value.field == "gpu_memory_fraction"
