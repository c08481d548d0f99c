"""All workers as columns of numbers, so that a decision costs about the same for one worker as for hundreds.

A row is written when something changes on its worker, and read by every decision. What follows from a row alone is
written with it. Columns have shape [number of workers]; float64 holds all counts that occur exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain, repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.types import Role
from router.cost import NUM_SIZES, PrefillModel, StepModel, TransferModel
from router.placement.holdings import Holdings, WorkerGroup
from router.placement.view import SharedView, WorkerKey, WorkerView

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

KindRelation = Callable[[int, int], bool]
"""Whether KV may go from a worker of the one kind to a worker of the other."""

_NUM_COLUMNS: Final = 27
_FIRST_CAPACITY: Final = 16
_MAX_GROUPS: Final = 1024
"""Groups of workers of which the rows are remembered."""
_FEW_GROUPS: Final = 8
"""Up to so many are looked at one by one."""
_NOTHING_KNOWN: Final = SharedView(
    prefill=PrefillModel().coefficients,
    step=StepModel().coefficients,
    handover=TransferModel().coefficients,
    fetch=TransferModel().coefficients,
)


def _never(source: int, destination: int) -> bool:
    return False


class Fleet:
    """Rows are in no particular order, and move when a worker leaves. What is public is read only."""

    def __init__(self, *, may_hand_over: KindRelation, may_fetch: KindRelation = _never) -> None:
        """The relations are asked once for each pair of kinds: from a prefill worker to a decode worker, and from
        whoever has a prefix to the prefill worker that wants it."""
        self._may_hand_over = may_hand_over
        self._may_fetch = may_fetch
        self._table = np.zeros((_NUM_COLUMNS + NUM_SIZES, _FIRST_CAPACITY))
        self._flags = np.zeros((7, _FIRST_CAPACITY), np.bool_)
        self._indices = np.zeros((2, _FIRST_CAPACITY), np.intp)
        self._row_of: dict[WorkerKey, int] = {}
        self.keys: list[WorkerKey] = []
        """By row."""
        self.hands_over = np.zeros((0, 0), np.bool_)
        """[from kind, to kind]."""
        self.fetches = np.zeros((0, 0), np.bool_)
        """[from kind, to kind]."""
        self.any_fetches = False
        """Whether there is any in that."""
        self._shared = _NOTHING_KNOWN
        self.version = 0
        """Another one whenever anything has changed."""
        self._ranked = True
        self._prefill_kinds: list[int] | None = None
        self._partners: dict[int, Bools | None] = {}
        self._sources: dict[int, Bools] = {}
        self._rows_of_group: dict[WorkerGroup, Indices] = {}
        self._cut()

    def __len__(self) -> int:
        return len(self.keys)

    def put(self, view: WorkerView) -> None:
        """Add a worker, or say what it is like now."""
        self.version += 1
        row = self._row_of.get(view.key)
        is_new = row is None
        if row is None:
            row = self._append(view.key)
        if view.kind >= len(self.hands_over):
            self._grow_kinds(view.kind + 1)
        if is_new or view.kind != self._indices[0, row]:
            self._indices[0, row] = view.kind
            self._partners.clear()
            self._sources.clear()
            self._prefill_kinds = None
        costs = (view.prefill, view.step, view.handover, view.fetch)
        is_prefill = view.role is Role.PREFILL
        self._flags[:, row] = (is_prefill, view.usable, view.chunk_tokens > 0, *(own is None for own in costs))
        shared = self._shared
        step_fixed_s, step_token_s, step_sequence_s = view.step or shared.step
        step_s = step_fixed_s + step_token_s * view.held_tokens + step_sequence_s * view.num_sequences
        pool_tokens = max(view.pool_tokens, 1)
        handover_s, handover_byte_s = view.handover or shared.handover
        fetch_s, fetch_byte_s = view.fetch or shared.fetch
        self._table[:, row] = (
            view.max_kv_tokens,
            view.pool_tokens,
            view.held_tokens,
            view.num_sequences,
            view.prefill_tokens,
            *(view.prefill or shared.prefill),
            step_fixed_s,
            step_token_s,
            step_sequence_s,
            handover_s,
            handover_byte_s * view.handover_nbytes,
            fetch_s,
            fetch_byte_s * view.fetch_nbytes,
            view.handover_nbytes,
            view.fetch_nbytes,
            view.fetch_odds,
            view.chunk_tokens,
            view.chunk_pause_s,
            view.spent_s,
            step_s,
            step_s + step_sequence_s,
            view.held_tokens / pool_tokens,
            1.0 / pool_tokens,
            view.max_kv_tokens if view.usable and is_prefill else -1.0,
            view.max_kv_tokens if view.usable and not is_prefill else -1.0,
            *view.waits,
        )
        if is_new:
            self._know_overhead()

    def share(self, shared: SharedView) -> None:
        """What those workers are like, from now on, that are not known themselves; and what all have in common."""
        self.version += 1
        self._shared = shared
        _, _, _, *borrows = self._flags[:, : len(self.keys)]
        own_columns = (
            (self.prefill_fixed, self.prefill_per_token, self.prefill_per_square),
            (self.step_fixed, self.step_per_token, self.step_per_sequence),
            (self.handover_fixed,),
            (self.fetch_fixed,),
        )
        values = (shared.prefill, shared.step, shared.handover[:1], shared.fetch[:1])
        for borrowing, columns, coefficients in zip(borrows, own_columns, values, strict=True):
            for column, value in zip(columns, coefficients, strict=True):
                column[borrowing] = value
        self._know_overhead()
        self.step_s[:] = (
            self.step_fixed + self.step_per_token * self.held_tokens + self.step_per_sequence * self.num_sequences
        )
        self.next_step_s[:] = self.step_s + self.step_per_sequence
        _, _, hands_over, fetches = borrows
        self.handover_per_token[hands_over] = shared.handover[1] * self._handover_nbytes[hands_over]
        self.fetch_per_token[fetches] = shared.fetch[1] * self._fetch_nbytes[fetches]

    def remove(self, key: WorkerKey) -> None:
        """Forget a worker. Harmless if it is not here."""
        row = self._row_of.pop(key, None)
        if row is None:
            return
        self.version += 1
        last = self.keys.pop()
        if last != key:
            for columns in (self._table, self._flags, self._indices):
                columns[:, row] = columns[:, len(self.keys)]
            self.keys[row] = last
            self._row_of[last] = row
        self._cut()

    def row(self, key: WorkerKey) -> int:
        """Of a worker that is here."""
        return self._row_of[key]

    @property
    def rank(self) -> Indices:
        """Place of each worker in the order of their keys: the last word between equals."""
        if not self._ranked:
            self._indices[1, sorted(range(len(self.keys)), key=self.keys.__getitem__)] = np.arange(len(self.keys))
            self._ranked = True
        return self._indices[1, : len(self.keys)]

    @property
    def prefill_kinds(self) -> list[int]:
        """Kinds of the prefill workers, usable or not."""
        if self._prefill_kinds is None:
            self._prefill_kinds = sorted(set(self.kind[self.is_prefill].tolist()))
        return self._prefill_kinds

    def partners(self, kind: int) -> Bools | None:
        """Decode workers to which prefill workers of that kind may hand over; None: all."""
        if kind not in self._partners:
            partners = self.hands_over[kind][self.kind]
            self._partners[kind] = None if (partners | self.is_prefill).all() else partners
        return self._partners[kind]

    def sources(self, kind: int) -> Bools:
        """Workers from which those of that kind may fetch KV."""
        sources = self._sources.get(kind)
        if sources is None:
            sources = self._sources[kind] = self.fetches[:, kind][self.kind]
        return sources

    def mask(self, keys: Collection[WorkerKey]) -> Bools:
        """True for those of `keys` that are here."""
        # One place more than there are workers, for who is not here.
        chosen = np.zeros(len(self.keys) + 1, np.bool_)
        chosen[self._rows_of(keys)] = True
        return chosen[:-1]

    def column(self, values: Mapping[WorkerKey, int]) -> Floats:
        """`values` by row, 0 where there is none."""
        # One place more than there are workers, for who is not here.
        column = np.zeros(len(self.keys) + 1)
        if not isinstance(values, Holdings):
            column[self._rows_of(values)] = np.fromiter(values.values(), np.float64, len(values))
        elif len(values.groups) <= _FEW_GROUPS:
            for group, num in values.groups:
                column[self._rows_of_workers(group)] = num
        else:
            # The last one of equal rows counts, as in the loop.
            keys = list(chain.from_iterable(group.keys for group, _ in values.groups))
            column[self._rows_of(keys)] = [num for group, num in values.groups for _ in group.keys]
        return column[:-1]

    def _rows_of_workers(self, group: WorkerGroup) -> Indices:
        rows = self._rows_of_group.get(group)
        if rows is None:
            if len(self._rows_of_group) >= _MAX_GROUPS:
                self._rows_of_group.clear()
            rows = self._rows_of_group[group] = self._rows_of(group.keys)
        return rows

    def _rows_of(self, keys: Collection[WorkerKey]) -> Indices:
        """-1 for who is not here."""
        return np.fromiter(map(self._row_of.get, keys, repeat(-1)), np.intp, len(keys))

    def _append(self, key: WorkerKey) -> int:
        row = self._row_of[key] = len(self.keys)
        self.keys.append(key)
        if row == self._table.shape[1]:
            # Twice as wide.
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._flags = np.concatenate([self._flags, np.zeros_like(self._flags)], axis=1)
            self._indices = np.concatenate([self._indices, np.zeros_like(self._indices)], axis=1)
        self._cut()
        return row

    def _cut(self) -> None:
        """The columns are as long as there are workers."""
        num_workers = len(self.keys)
        self._ranked = False
        self._prefill_kinds = None
        self._partners.clear()
        self._sources.clear()
        self._rows_of_group.clear()
        columns = iter(self._table[:, :num_workers])
        self.is_prefill: Bools = self._flags[0, :num_workers]
        self.usable: Bools = self._flags[1, :num_workers]
        self.computes_prompts: Bools = self._flags[2, :num_workers]
        """Decode workers that do."""
        self.kind: Indices = self._indices[0, :num_workers]
        self._know_overhead()
        self.rows: Indices = np.arange(num_workers)
        self.nothing: Floats = np.zeros(num_workers)
        self.never: Floats = np.full(num_workers, np.inf)
        self.max_kv_tokens: Floats = next(columns)
        self.pool_tokens: Floats = next(columns)
        self.held_tokens: Floats = next(columns)
        self.num_sequences: Floats = next(columns)
        self.prefill_tokens: Floats = next(columns)
        self.prefill_fixed: Floats = next(columns)
        self.prefill_per_token: Floats = next(columns)
        self.prefill_per_square: Floats = next(columns)
        self.step_fixed: Floats = next(columns)
        self.step_per_token: Floats = next(columns)
        self.step_per_sequence: Floats = next(columns)
        self.handover_fixed: Floats = next(columns)
        self.handover_per_token: Floats = next(columns)
        self.fetch_fixed: Floats = next(columns)
        self.fetch_per_token: Floats = next(columns)
        self._handover_nbytes: Floats = next(columns)
        self._fetch_nbytes: Floats = next(columns)
        self.fetch_odds: Floats = next(columns)
        self.chunk_tokens: Floats = next(columns)
        self.chunk_pause_s: Floats = next(columns)
        self.spent_s: Floats = next(columns)
        self.step_s: Floats = next(columns)
        """Of a step as the load is now."""
        self.next_step_s: Floats = next(columns)
        """The same with one more sequence, that has no context."""
        self.pool_used: Floats = next(columns)
        """Part of the pool."""
        self.pool_per_token: Floats = next(columns)
        self.prefill_limit: Floats = next(columns)
        """`max_kv_tokens` of usable prefill workers, -1 of all others."""
        self.decode_limit: Floats = next(columns)
        """The same of decode workers."""
        self.waits: Floats = self._table[_NUM_COLUMNS:, :num_workers]
        """[size, worker]."""

    def _know_overhead(self) -> None:
        shared = self._shared
        self.overhead_s: Floats = np.where(self.is_prefill, shared.prefill_overhead_s, shared.decode_overhead_s)
        """What a prompt with nobody in front takes beside fetch and compute."""

    def _grow_kinds(self, num_kinds: int) -> None:
        self.hands_over = _extended(self.hands_over, self._may_hand_over, num_kinds)
        self.fetches = _extended(self.fetches, self._may_fetch, num_kinds)
        self.any_fetches = bool(self.fetches.any())


def _extended(known: Bools, relation: KindRelation, num_kinds: int) -> Bools:
    """`known` for further kinds; what is known is not asked again."""
    size = len(known)
    wider = np.zeros((num_kinds, num_kinds), np.bool_)
    wider[:size, :size] = known
    for source in range(num_kinds):
        for destination in range(num_kinds):
            if source >= size or destination >= size:
                wider[source, destination] = relation(source, destination)
    return wider
