"""The blocks of sequences whose layers all have a window: what is hidden is given back, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.block_hash import BlockHasher, BlockHashes
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.kv_window import ALIGN_TOKENS, KvWindow, without
from pdserve.types import HandoffId

BLOCK = 32
HASHER = BlockHasher(model_fingerprint="m", block_size=BLOCK)


def key(name: str) -> HandoffId:
    return HandoffId(name, 1)


def blocks_of(num_blocks: int, size: int, sinks: int = 0) -> SequenceBlocks:
    return SequenceBlocks(num_blocks, HASHER, window=KvWindow(size, sinks))


@pytest.mark.parametrize("sinks", [0, 1, 128, 130])
@pytest.mark.parametrize("size", [1, 128, 300])
def test_what_is_hidden_is_never_seen_again_and_what_is_kept_mostly_is(size: int, sinks: int) -> None:
    window = KvWindow(size, sinks)
    for num_tokens in (0, 1, 127, 128, 129, 300, 427, 428, 700, 1000):
        hidden = window.hidden_tokens(num_tokens)
        # The next query is at position num_tokens and sees (num_tokens - size, num_tokens], and the sinks.
        assert all(position < num_tokens - size + 1 and position >= sinks for position in hidden)
        kept = num_tokens - len(hidden)
        assert kept <= -(-sinks // ALIGN_TOKENS) * ALIGN_TOKENS + size + ALIGN_TOKENS
        assert kept <= window.most_tokens(num_tokens, 0)
        assert [p for p in range(num_tokens) if p not in hidden][:-1] == [
            p for p in range(num_tokens - 1) if p not in hidden
        ]
        assert without(hidden, num_tokens) == sum(p not in hidden for p in range(num_tokens))


def test_without_a_window_nothing_is_hidden() -> None:
    assert not KvWindow().hidden_tokens(10**6)
    assert KvWindow().most_tokens(10**6, 7) == 10**6


def test_a_long_sequence_lives_in_a_small_pool() -> None:
    """2,000 tokens in a pool for 512, with the table's places where they were."""
    blocks = blocks_of(16, size=256, sinks=4)
    tokens = list(range(2000))
    assert blocks.open(key("a"), tokens[:100], blocks.chain(), room=128) == 0
    most = 0
    for n in range(100, 2000):
        assert blocks.grow(key("a"), n + 1)
        blocks.publish(key("a"), n, tokens[: n + 1])
        blocks.hide(key("a"), n)
        most = max(most, blocks.num_used)
    assert len(blocks.ids(key("a"))) == -(-2000 // BLOCK)
    assert blocks.num_held(key("a")) == blocks.num_used
    assert most * BLOCK <= 128 + 256 + 2 * ALIGN_TOKENS
    blocks.check_integrity()
    blocks.close(key("a"))
    assert blocks.num_used == 0
    blocks.check_integrity()


def test_what_arrives_has_no_blocks_for_what_is_hidden() -> None:
    blocks = blocks_of(64, size=100, sinks=4)
    assert blocks.open(key("a"), list(range(1000)), blocks.chain(), room=1010, arrives=True) == 0
    hidden = blocks.window.hidden_blocks(1000, BLOCK)
    assert (hidden.start * BLOCK, hidden.stop * BLOCK) == (128, 896)
    assert blocks.num_used == blocks.blocks_for(1010) - len(hidden)
    held = [b for place, b in enumerate(blocks.ids(key("a"))) if place not in hidden]
    assert len(set(held)) == len(held)
    blocks.publish(key("a"), 1000, list(range(1000)))
    assert len(blocks.names) == 1000 // BLOCK - len(hidden), "what is not here is not announced"
    blocks.check_integrity()


def test_a_beginning_is_found_without_what_is_hidden_at_its_end() -> None:
    """What is found is there in full or behind the window; a gap in the window ends it before the gap."""
    blocks = blocks_of(64, size=100)
    tokens = list(range(1100))
    blocks.open(key("a"), tokens, blocks.chain(), room=1100, arrives=True)
    blocks.publish(key("a"), 1100, tokens)
    blocks.close(key("a"))
    names = blocks.chain().upto(1088, tokens)
    assert blocks.num_cached_tokens(names) == 1088
    assert blocks.num_cached_tokens(names[: 1024 // BLOCK]) == 1024
    # From 992 tokens on a query sees the one at 893, before what has come.
    assert blocks.num_cached_tokens(names[: 992 // BLOCK]) == 0
    assert blocks.open(key("b"), tokens, blocks.chain(), room=1100) == 1088
    assert blocks.num_held(key("b")) == blocks.blocks_for(1100) - 896 // BLOCK
    blocks.check_integrity()


def test_branches_share_what_is_not_hidden() -> None:
    blocks = blocks_of(64, size=100)
    tokens = list(range(500))
    blocks.open(key("a"), tokens, blocks.chain(), room=510, arrives=True)
    chain = blocks.chain()
    assert blocks.fork(key("b"), key("a"), chain, num_tokens=500, room=510)
    assert blocks.num_held(key("a")) == blocks.num_held(key("b")) == 16 - 384 // BLOCK
    assert blocks.num_used == blocks.num_held(key("a")) + 1
    blocks.hide(key("a"), 700)
    blocks.check_integrity()
    assert blocks.num_held(key("b")) == 4
    blocks.close(key("a"))
    blocks.close(key("b"))
    assert blocks.num_used == 0
    blocks.check_integrity()


class Model(RuleBasedStateMachine):
    """Sequences of few different tokens that come, grow and leave in a pool that is too small for all of them. What a
    block holds is modelled; whoever reads a block that is not hidden must find its own tokens there."""

    @initialize(size=st.sampled_from([1, 100, 128, 200]), sinks=st.sampled_from([0, 4, 129]))
    def start(self, size: int, sinks: int) -> None:
        self.blocks = blocks_of(24, size, sinks)
        self.content: dict[int, tuple[int, ...]] = {}
        self.live: dict[HandoffId, tuple[list[int], int, BlockHashes]] = {}
        """Tokens, how many of them have KV, and their names."""
        self.count = 0

    def tokens(self, letters: list[int], length: int) -> list[int]:
        return [letters[i // 64 % len(letters)] for i in range(length)]

    @rule(
        letters=st.lists(st.integers(0, 1), min_size=1, max_size=12), length=st.integers(2, 700), arrives=st.booleans()
    )
    def open(self, letters: list[int], length: int, arrives: bool) -> None:
        self.count += 1
        name, tokens, chain = key(f"s{self.count}"), self.tokens(letters, length), self.blocks.chain()
        used = self.blocks.num_used
        found = self.blocks.open(name, tokens, chain, room=length, arrives=arrives, ahead=None if arrives else 256)
        if found is None:
            assert self.blocks.num_used == used
            return
        self.live[name] = (tokens, found, chain)
        if arrives:
            self.write(name, length)
        self.check(name)

    def write(self, name: HandoffId, num_final: int) -> None:
        """What a hand-off brings."""
        tokens, begin, chain = self.live[name]
        ids = self.blocks.ids(name)
        hidden = self.blocks.window.hidden_blocks(num_final, BLOCK)
        for place in range(begin // BLOCK, -(-num_final // BLOCK)):
            if place not in hidden:
                self.content[ids[place]] = tuple(tokens[: min(num_final, (place + 1) * BLOCK)])
        self.live[name] = (tokens, num_final, chain)
        self.blocks.publish(name, num_final, tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(1, 300))
    def compute(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(list(self.live)))
        tokens, num_final, _ = self.live[name]
        end = min(len(tokens), num_final + more)
        if end == num_final or not self.blocks.grow(name, end):
            return
        ids = self.blocks.ids(name)
        for place in range(num_final // BLOCK, -(-end // BLOCK)):
            self.content[ids[place]] = tuple(tokens[: min(end, (place + 1) * BLOCK)])
        self.live[name] = (tokens, end, self.live[name][2])
        self.blocks.publish(name, end, tokens)
        self.blocks.hide(name, end)
        assert not self.blocks.hides(name, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.live)))
        self.blocks.close(name)
        del self.live[name]

    def check(self, name: HandoffId) -> None:
        tokens, num_final, _ = self.live[name]
        hidden = self.blocks.window.hidden_blocks(num_final, BLOCK)
        ids = self.blocks.ids(name)
        for place in range(-(-num_final // BLOCK)):
            if place not in hidden:
                seen = tuple(tokens[: min(num_final, (place + 1) * BLOCK)])
                assert self.content[ids[place]][: len(seen)] == seen, f"block {place} of {name} is another's"

    @invariant()
    def everybody_reads_what_is_theirs(self) -> None:
        for name in getattr(self, "live", {}):
            self.check(name)
        if hasattr(self, "blocks"):
            self.blocks.check_integrity()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
