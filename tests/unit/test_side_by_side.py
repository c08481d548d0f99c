"""What stays together when tests run side by side."""

from __future__ import annotations

import re
from pathlib import Path

from pdserve.testing.side_by_side import LONGEST, SHARED_CLUSTERS, place_of, whole_of

PROCESS = Path(__file__).parents[1] / "process"


def test_modules_on_shared_clusters_are_one_whole_and_others_each_one_of_their_own() -> None:
    shared = {PROCESS / f"test_{name}.py" for name in ("cancel", "exactness", "text")}
    others = {PROCESS / f"test_{name}.py" for name in ("launch", "ray", "cpu_exactness")}
    assert len({whole_of(module) for module in shared}) == 1
    assert len({whole_of(module) for module in shared | others}) == 1 + len(others)


def test_the_names_are_those_of_fixtures() -> None:
    fixtures = re.findall(
        r"^def (\w+)\(.*\) -> Iterator\[ProcessCluster\]", (PROCESS / "conftest.py").read_text(), re.M
    )
    assert set(fixtures) >= SHARED_CLUSTERS


def test_what_comes_first_is_there() -> None:
    assert [module for module in LONGEST if not (PROCESS.parents[1] / module).is_file()] == []
    assert place_of(LONGEST[0]) < place_of(LONGEST[-1]) < place_of("tests/unit/test_side_by_side.py")
