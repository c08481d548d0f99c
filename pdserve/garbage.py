"""When a service collects garbage: seldom while it starts, and never again what is there once it has started.

Collections are set off by the number of new objects, and importing torch makes half a million that stay. Going through
them again and again took a fifth of the CPU time of a worker's start.
"""

from __future__ import annotations

import gc

NEW_OBJECTS_WHILE_STARTING = 100_000
"""That set off a collection of the youngest. Not never: loading a large model may leave garbage, too."""

_ORDINARY = gc.get_threshold()


def collect_seldom() -> None:
    """For a process that starts. Call it before what it imports; `settle` ends it."""
    gc.set_threshold(NEW_OBJECTS_WHILE_STARTING)


def settle() -> None:
    """What is there now stays. Going through all of it again and again would stop every stream for a while."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_ORDINARY)
