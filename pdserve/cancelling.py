"""A cancel that a TaskGroup has swallowed."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """For a loop that goes on after its TaskGroup has broken.

    When a task of the group breaks at the moment at which the loop is cancelled, the group raises what broke it alone,
    and the loop would go on for ever. The count of cancels can be trusted only if the body of the group waits for
    something that never returns: before Python 3.13, a task that fails while the group only waits for its tasks leaves
    a cancel behind that nobody has asked for.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError
