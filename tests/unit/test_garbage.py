"""Garbage collection of a service that starts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pdserve.garbage import NEW_OBJECTS_WHILE_STARTING, collect_seldom, settle


class Knot:
    """Only a collection ends it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_hardly_anything_is_collected_while_a_service_starts() -> None:
    collect_seldom()
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    kept: list[list[int]] = [[] for _ in range(NEW_OBJECTS_WHILE_STARTING // 2)]
    assert gc.get_stats()[0]["collections"] == before
    kept += [[] for _ in range(NEW_OBJECTS_WHILE_STARTING)]
    assert gc.get_stats()[0]["collections"] > before, "garbage of a long start must not pile up"


def test_a_service_that_has_started_collects_as_ever_and_leaves_alone_what_was_there(
    thresholds: tuple[int, int, int],
) -> None:
    collect_seldom()
    knot = weakref.ref(Knot())
    there = Knot()
    settle()
    assert knot() is None
    assert gc.get_threshold() == thresholds
    assert gc.is_tracked(there)
    assert all(each is not there for each in gc.get_objects()), "it would be gone through again"
