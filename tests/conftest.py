"""Settings of all tests."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from pdserve.garbage import collect_seldom, settle
from pdserve.testing.side_by_side import place_of, whole_of

# Triton decides at its import whether kernels are compiled, for a GPU, or interpreted. Others import it, too.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Models of tests are too small for several threads: they would wait for each other, and for those of another test
# process, in loops. Before numpy and torch are imported. Engines set what their configuration says.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long one example takes says more about the machine than about the code; the time limit of a test is pytest's.
settings.register_profile("pdserve", deadline=None)
settings.load_profile("pdserve")

# Processes of pytest-xdist ignore it, and what they start would as well; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side, modules that take long come first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: place_of(item.nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: modules, and all those that share clusters as one."""
    if config.getvalue("dist") != "loadfile":
        return None
    # Not where tests run without pytest-xdist.
    from xdist.scheduler import LoadFileScheduling

    class WholeScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return whole_of(config.rootpath / nodeid.partition("::")[0])

    return WholeScheduling(config, log)


# While hundreds of modules are imported.
collect_seldom()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules and collected tests stay until the end. Going through their 700,000 objects would take a third of a
    second whenever a test collects garbage to see what is left of its own."""
    settle()


# Triton's bindings print a page about objects that are left when the interpreter ends. Not before: pytest collects
# garbage twice when it has run.
atexit.register(gc.unfreeze)
