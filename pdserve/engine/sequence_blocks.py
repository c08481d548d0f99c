"""The blocks of each sequence: between schedulers, which count tokens, and the block manager, which knows no tokens.

A sequence has room for some tokens, in blocks. The first `num_final` tokens have their KV there; full blocks below that
are published, so that later sequences with the same beginning share them instead of computing or receiving them again.
Full and final blocks only are ever shared, and nobody writes below `num_final`: a shared block is never written to.

Branches of one sequence share the blocks that it fills, and each has blocks of its own behind them. That is arranged
before the KV is there, so that there is room for all of them or for none; the part of a block with which the sequence
ends is then copied into the first block of each branch that is its own.

Where all layers have a window (`pdserve/kv_window.py`), a sequence has no blocks for what is hidden behind it. Places
in its block table keep their meaning: those entries name some block that nobody reads for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pdserve.block_hash import BlockHasher, BlockHashes
from pdserve.engine.block_manager import BlockManager, Blocks, NameListener
from pdserve.kv_window import AHEAD_TOKENS, NO_WINDOW, KvWindow
from pdserve.types import HandoffId

_NO_BLOCK = 0
"""In block tables at hidden places."""


@dataclass(slots=True)
class _Entry:
    ids: tuple[int, ...]
    """The block table."""
    hashes: BlockHashes
    final_names: list[bytes]
    """Names of the blocks whose content is final."""
    hidden: range
    """Places that have no block."""

    def held(self, begin: int = 0, end: int | None = None) -> tuple[int, ...]:
        """The blocks at places [begin, end)."""
        ids = self.ids[:end]
        if not self.hidden:
            return ids[begin:]
        return (*ids[begin : self.hidden.start], *ids[max(begin, self.hidden.stop) :])


class SequenceBlocks:
    """All sequences of one worker that hold blocks."""

    def __init__(
        self,
        num_blocks: int,
        hasher: BlockHasher,
        listener: NameListener | None = None,
        *,
        window: KvWindow = NO_WINDOW,
    ) -> None:
        """`listener` hears which blocks can be found by name."""
        self.block_size = hasher.block_size
        self.window = window
        self._hasher = hasher
        self._manager = BlockManager(num_blocks, listener)
        self._entries: dict[HandoffId, _Entry] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in all; what is neither used nor cached is free."""
        return self._manager.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold; a shared one counts once."""
        return self._manager.num_used

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence holds, kept for their content until they are needed."""
        return self._manager.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `open` and `grow` may take: free and cached ones."""
        return self._manager.num_available

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that fits if there is no other."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    @property
    def names(self) -> Collection[bytes]:
        """Names of all blocks that can be found here, in no order. A view: it changes with the next call."""
        return self._manager.names

    def chain(self, salt: str = "") -> BlockHashes:
        """What `open` needs for a new sequence. Keep it: opening the sequence again then hashes nothing twice.

        With a `salt` the prefix cache is shared with sequences of the same salt alone.
        """
        return self._hasher.chain(salt)

    def open(
        self,
        key: HandoffId,
        token_ids: Sequence[int],
        hashes: BlockHashes,
        *,
        room: int,
        keep: int = 0,
        reuse: bool = True,
        arrives: bool = False,
        ahead: int | None = None,
    ) -> int | None:
        """Give `key` blocks for `room` tokens, of which `token_ids` are known and about to get their KV.

        Returns how many leading tokens have it already: whole blocks, and never all of `token_ids`, because something
        has to be computed for a next token to be drawn. None means "not now" and changes nothing. `keep` blocks must
        stay available to others. Without `reuse` nothing is taken from the cache: every token is to be computed.

        If it `arrives`, the KV of all `token_ids` comes at once, without what is hidden by then, for which there are no
        blocks. With `ahead` there is room for not more than so many tokens behind those that have their KV already;
        call `grow` for the rest.
        """
        assert key not in self._entries, f"{key} has blocks already"
        names = hashes.upto(len(token_ids) - 1, token_ids) if reuse else []
        found = self._find(names)
        num_places = self.blocks_for(max(room, len(token_ids)))
        if ahead is not None:
            num_places = min(num_places, self.blocks_for(len(found) * self.block_size + ahead))
        num_final = len(token_ids) if arrives else len(found) * self.block_size
        hidden = self.window.hidden_blocks(num_final, self.block_size)
        known = [block_id for place, block_id in enumerate(found) if place not in hidden]
        blocks = self._manager.take(known, num_places - len(hidden) - len(known), keep=keep)
        if blocks is None:
            return None
        ids = (*blocks.ids[: hidden.start], *[_NO_BLOCK] * len(hidden), *blocks.ids[hidden.start :])
        self._entries[key] = _Entry(ids, hashes, names[: len(found)], hidden)
        return len(found) * self.block_size

    def _find(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest beginning that is here: of its blocks all, or all that are not hidden at its end."""
        if not self.window.size:
            return self._manager.find(names)
        found = self._manager.lookup(names)
        head = self.window.hidden_blocks(0, self.block_size).start
        # Behind the last missing one before each place; those below `head` may never be missing.
        complete_from, longest = 0, 0
        for place, block_id in enumerate(found):
            if block_id is None:
                if place < head:
                    break
                complete_from = place + 1
            elif complete_from <= max(
                head, self.window.hidden_blocks((place + 1) * self.block_size, self.block_size).stop
            ):
                longest = place + 1
        return [_NO_BLOCK if block_id is None else block_id for block_id in found[:longest]]

    def fork(self, key: HandoffId, of: HandoffId, hashes: BlockHashes, *, num_tokens: int, room: int) -> bool:
        """Give `key` blocks for `room` tokens, of which the first `num_tokens` are also those of sequence `of`.

        The blocks that they fill are shared with it, and must get their KV before `key` is computed. The others are
        new; see `tail`. False means "not now" and changes nothing.
        """
        assert key not in self._entries, f"{key} has blocks already"
        entry = self._entries[of]
        num_shared = num_tokens // self.block_size
        assert num_shared <= len(entry.ids), f"{of} has no room for {num_tokens} tokens"
        shared = entry.held(0, num_shared)
        blocks = self._manager.take(shared, self.blocks_for(max(room, num_tokens)) - num_shared)
        if blocks is None:
            return False
        ids = (*entry.ids[:num_shared], *blocks.ids[len(shared) :])
        hidden = range(min(entry.hidden.start, num_shared), min(entry.hidden.stop, num_shared))
        self._entries[key] = _Entry(ids, hashes, entry.final_names[:num_shared], hidden)
        return True

    def tail(self, key: HandoffId, of: HandoffId, num_tokens: int) -> tuple[int, int] | None:
        """The block of `of` that the last of the `num_tokens` tokens shared with `key` do not fill, and the block of
        `key` into which it has to be copied. None if there is none."""
        num_shared, rest = divmod(num_tokens, self.block_size)
        return (self.ids(of)[num_shared], self.ids(key)[num_shared]) if rest else None

    def num_cached_tokens(self, names: Sequence[bytes]) -> int:
        """Leading tokens of a sequence, whose full blocks have these names, that have their KV here, as for `open`."""
        return len(self._find(names)) * self.block_size

    def hold(self, key: HandoffId, names: Sequence[bytes], *, keep: int = 0) -> int:
        """Keep the blocks of the longest run of `names`, which are published here, under `key` until `close`.

        Returns how many blocks that are; with 0 there is nothing to close. `keep` blocks stay available to others.
        """
        assert key not in self._entries, f"{key} has blocks already"
        blocks = self._manager.hold(names, keep=keep)
        if blocks:
            names = list(names[: len(blocks)])
            self._entries[key] = _Entry(blocks.ids, self._hasher.chain(), names, range(0))
        return len(blocks)

    def grow(self, key: HandoffId, room: int) -> bool:
        """See to it that `key` has blocks for `room` tokens. False means "not now" and changes nothing."""
        entry = self._entries[key]
        missing = self.blocks_for(room) - len(entry.ids)
        if missing <= 0:
            return True
        more = self._manager.take((), missing)
        if more is None:
            return False
        entry.ids += more.ids
        return True

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence that grows to `num_tokens` tokens holds at most at once, if it gets room for no more
        than AHEAD_TOKENS at a time."""
        return self.blocks_for(self.window.most_tokens(num_tokens, AHEAD_TOKENS))

    def hides(self, key: HandoffId, num_tokens: int) -> bool:
        """Whether `hide` would give something back."""
        hidden = self.window.hidden_blocks(num_tokens, self.block_size)
        return hidden.stop > max(hidden.start, self._entries[key].hidden.stop)

    def hide(self, key: HandoffId, num_tokens: int) -> None:
        """The first `num_tokens` tokens have their KV, and nobody reads for `key` what is hidden by now: its blocks are
        given back. What is published of it stays to be found until the room is needed."""
        entry = self._entries[key]
        hidden = self.window.hidden_blocks(num_tokens, self.block_size)
        hidden = range(hidden.start, min(hidden.stop, len(entry.ids)))
        begin = max(hidden.start, entry.hidden.stop)
        if begin >= hidden.stop:
            return
        self._give_back(entry, begin, hidden.stop)
        none = (_NO_BLOCK,) * (hidden.stop - begin)
        entry.ids = (*entry.ids[:begin], *none, *entry.ids[hidden.stop :])
        entry.hidden = hidden

    def publish(self, key: HandoffId, num_final: int, token_ids: Sequence[int]) -> None:
        """The KV of the first `num_final` of `token_ids`, the sequence's tokens so far, is in place and final."""
        entry = self._entries[key]
        names = entry.hashes.upto(num_final, token_ids)
        begin = len(entry.final_names)
        if len(names) > begin:
            # What was hidden when its KV came is not here.
            hidden = entry.hidden or range(len(names), len(names))
            for first, last in ((begin, min(hidden.start, len(names))), (max(begin, hidden.stop), len(names))):
                if first < last:
                    self._manager.publish(entry.ids[first:last], names[first:last])
            entry.final_names = names

    def close(self, key: HandoffId) -> None:
        """The sequence is over or must make room. What was published stays to be found until the room is needed."""
        entry = self._entries.pop(key)
        self._give_back(entry, entry.hidden.stop if entry.hidden else 0, len(entry.ids))
        if entry.hidden:
            self._give_back(entry, 0, entry.hidden.start)

    def _give_back(self, entry: _Entry, begin: int, end: int) -> None:
        self._manager.free(Blocks(entry.ids[begin:end]), entry.final_names[begin:end])

    def ids(self, key: HandoffId) -> tuple[int, ...]:
        """Block table of a sequence."""
        return self._entries[key].ids

    def holds(self, key: HandoffId) -> bool:
        """Whether a sequence has blocks."""
        return key in self._entries

    def num_held(self, key: HandoffId) -> int:
        """Blocks of a sequence, shared ones included."""
        entry = self._entries[key]
        return len(entry.ids) - len(entry.hidden)

    def room(self, key: HandoffId) -> int:
        """Tokens that there is room for without `grow`, those included that are hidden."""
        return len(self._entries[key].ids) * self.block_size

    def check_integrity(self) -> None:
        """Assert that the block manager is consistent and that exactly the sequences known here hold its blocks."""
        self._manager.check_integrity()
        counts = [0] * self.num_blocks
        for entry in self._entries.values():
            for block_id in entry.held():
                counts[block_id] += 1
        assert counts == [self._manager.ref_count(b) for b in range(self.num_blocks)], "a reference has no sequence"
