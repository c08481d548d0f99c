"""Tests that take minutes run when they are asked for, with `-m chaos`. The plain run has short forms."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `long` in a plain run."""
    if config.option.markexpr == "chaos":
        return
    skip = pytest.mark.skip(reason="minutes; the plain run has the short form")
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(skip)
