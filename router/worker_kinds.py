"""Which workers KV may move between. Workers of a deployment are of few kinds, and what holds for one pair of workers
holds for all pairs of their kinds."""

from __future__ import annotations

import logging
from dataclasses import replace

from pdserve.types import Role
from pdserve.worker_info import WorkerInfo

log = logging.getLogger(__name__)


class WorkerKinds:
    """Kinds are numbers from 0, in the order in which they were first seen. They are never forgotten: what tells them
    apart is configuration, of which a deployment has only so much."""

    def __init__(self) -> None:
        self._number_of: dict[WorkerInfo, int] = {}
        self._examples: list[WorkerInfo] = []

    def of(self, info: WorkerInfo) -> int:
        """The kind of a worker."""
        essence = replace(info, worker_id="", incarnation="", address="", version="", num_blocks=0, max_model_len=0)
        number = self._number_of.get(essence)
        if number is None:
            number = self._number_of[essence] = len(self._examples)
            self._examples.append(info)
        return number

    def may_hand_over(self, prefill: int, decode: int) -> bool:
        """Whether KV of a prefill worker may go to a decode worker. Says in the log why not, of the first such
        pair of workers only."""
        source, target = self._examples[prefill], self._examples[decode]
        if source.role is not Role.PREFILL or target.role is not Role.DECODE:
            return False
        problems = source.incompatibilities(target)
        if problems:
            log.error(
                "prefill worker %s and decode worker %s are never paired: %s",
                source.worker_id,
                target.worker_id,
                "; ".join(problems),
            )
        return not problems

    def may_migrate(self, source: int, target: int) -> bool:
        """Whether streams of one decode worker can go on at another one: blocks may differ in size, and what goes over
        is exact."""
        ours, theirs = self._examples[source].as_prefix_peer, self._examples[target]
        return ours.role is theirs.role is Role.DECODE and not ours.incompatibilities(theirs)

    def may_fetch(self, holder: int, prefill: int) -> bool:
        """Whether blocks of one mean the same to the other, and have the same names."""
        theirs, ours = self._examples[holder].as_prefix_peer, self._examples[prefill].as_prefix_peer
        same_size = theirs.kv_layout.block_size == ours.kv_layout.block_size
        return same_size and not theirs.incompatibilities(ours)
