"""Which workers say that they have which blocks: names to workers, for all blocks of the deployment.

Everything here is a claim and may be wrong by the time it is used: a worker that has dropped a block computes it again.
A name stands for its block and all blocks before it (see `pdserve/block_hash.py`), so chains of other models, block
sizes and salts never meet, and nothing here has to tell them apart.

Sets of workers are integers with one bit for each. There are few different ones, as most blocks are on one or two
workers, and equal ones are one object. The names of one worker lie end to end in one array of bytes. So a block costs
little more than its name, its place in a dictionary, and 16 bytes for each worker that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pdserve.block_hash import NAME_NBYTES
from pdserve.store.prefix_events import unpack
from router.placement import Holdings, WorkerGroup, WorkerKey

MAX_SHARED_SETS: Final = 1 << 16
"""Different sets of workers of which one object is kept for all blocks. Beyond that, sharing begins anew."""

MAX_LISTED_SETS: Final = 1024
"""Sets of workers whose members are listed."""

STRIDES: Final = (64, 8, 1)
"""A worker that has the last of so many blocks is taken to have the others. Workers drop the ends of sequences first;
where one has a hole all the same, the claim is wrong like that of a block which it has just dropped. A look-up in a
large index is a few cache misses, which a prompt of thousands of blocks notices."""

STALE_NAMES: Final = 1024
"""Names in a worker's list that it does not hold any more, before anything is done about them."""


class _Holder:
    """One worker. `packed` has every name that it holds, and some that it does not hold any more."""

    __slots__ = ("flag", "key", "num_held", "packed")

    def __init__(self, key: WorkerKey, flag: int) -> None:
        self.key = key
        self.flag = flag
        self.packed = bytearray()
        self.num_held = 0


class PrefixIndex:
    """Not thread-safe. No call costs more than its arguments, but `cleared`: that costs what the worker has."""

    def __init__(self) -> None:
        self._holders_of: dict[bytes, int] = {}
        """Workers of each name, as flags."""
        self._shared: dict[int, int] = {}
        """One object for each set of workers."""
        self._holders: dict[WorkerKey, _Holder] = {}
        self._by_bit: list[_Holder | None] = []
        self._groups: dict[int, WorkerGroup] = {}
        """Workers of sets that were asked for lately: what many prompts begin with is held by many."""

    def __len__(self) -> int:
        """Names that somebody holds."""
        return len(self._holders_of)

    def num_blocks(self, worker: WorkerKey) -> int:
        """Blocks that `worker` holds."""
        holder = self._holders.get(worker)
        return 0 if holder is None else holder.num_held

    def stored(self, worker: WorkerKey, names: Sequence[bytes]) -> None:
        """`worker` has these blocks. Names that it had already are ignored."""
        holder = self._holders.get(worker) or self._add(worker)
        flag, holders_of, shared = holder.flag, self._holders_of, self._shared
        new: list[bytes] = []
        for name in names:
            before = holders_of.get(name, 0)
            if not before & flag:
                after = before | flag
                holders_of[name] = shared.setdefault(after, after)
                new.append(name)
        holder.packed += b"".join(new)
        holder.num_held += len(new)
        if len(holder.packed) > (2 * holder.num_held + STALE_NAMES) * NAME_NBYTES:
            held = (name for name in unpack(bytes(holder.packed)) if holders_of.get(name, 0) & flag)
            holder.packed = bytearray(b"".join(dict.fromkeys(held)))
        if len(shared) > MAX_SHARED_SETS:
            shared.clear()

    def removed(self, worker: WorkerKey, names: Sequence[bytes]) -> None:
        """`worker` has dropped these blocks. Names that it did not have are ignored."""
        holder = self._holders.get(worker)
        if holder is not None:
            holder.num_held -= self._remove(holder.flag, names)

    def cleared(self, worker: WorkerKey) -> None:
        """`worker` has nothing, or is gone."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            self._remove(holder.flag, unpack(bytes(holder.packed)))
            self._by_bit[holder.flag.bit_length() - 1] = None
            self._groups.clear()

    def match(self, names: Sequence[bytes]) -> Holdings:
        """Of each worker that has the first of `names`, those of a sequence: how many it has before the first one that
        it has not, if it drops what it drops from the end of a sequence."""
        found: list[tuple[WorkerGroup, int]] = []
        active = self._holders_of.get(names[0], 0) if names else 0
        if not active:
            return Holdings.none()
        active = self._narrow(active, names, 0, len(names), 0, found)
        if active:
            found.append((self._group(active), len(names)))
        return Holdings(found)

    def _narrow(
        self,
        active: int,
        names: Sequence[bytes],
        begin: int,
        end: int,
        level: int,
        found: list[tuple[WorkerGroup, int]],
    ) -> int:
        """Look at these names in steps of STRIDES[level], and closer where a worker in `active` is lost. Report those,
        and return the others."""
        stride, holders_of = STRIDES[level], self._holders_of.get
        while end - begin >= stride:
            if lost := active & ~holders_of(names[begin + stride - 1], 0):
                if stride == 1:
                    found.append((self._group(lost), begin))
                    active ^= lost
                else:
                    active = self._narrow(active, names, begin, begin + stride, level + 1, found)
                if not active:
                    return 0
            begin += stride
        return active if begin == end else self._narrow(active, names, begin, end, level + 1, found)

    def _group(self, flags: int) -> WorkerGroup:
        group = self._groups.get(flags)
        if group is None:
            if len(self._groups) >= MAX_LISTED_SETS:
                self._groups.clear()
            group = self._groups[flags] = WorkerGroup(tuple(self._keys(flags)))
        return group

    def _keys(self, flags: int) -> Iterator[WorkerKey]:
        while flags:
            flag = flags & -flags
            holder = self._by_bit[flag.bit_length() - 1]
            assert holder is not None, "a name has a holder that nobody knows"
            yield holder.key
            flags ^= flag

    def _remove(self, flag: int, names: Sequence[bytes]) -> int:
        """Returns how many of them were there."""
        holders_of, shared = self._holders_of, self._shared
        num_removed = 0
        for name in names:
            before = holders_of.get(name, 0)
            if before & flag:
                num_removed += 1
                if before == flag:
                    del holders_of[name]
                else:
                    after = before ^ flag
                    holders_of[name] = shared.setdefault(after, after)
        return num_removed

    def _add(self, worker: WorkerKey) -> _Holder:
        """Bits are used again, so that sets stay as small as the deployment is."""
        bit = next((bit for bit, holder in enumerate(self._by_bit) if holder is None), len(self._by_bit))
        if bit == len(self._by_bit):
            self._by_bit.append(None)
        holder = self._by_bit[bit] = self._holders[worker] = _Holder(worker, 1 << bit)
        return holder
