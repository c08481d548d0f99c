"""What threads may do to reserved blocks, and what they may not."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from kv_transfer.chunk_io import decode_io
from kv_transfer.kv_codec import PayloadError
from kv_transfer.messages import LinkId
from kv_transfer.plan import Chunk, ChunkPlan
from kv_transfer.tickets import ChunkLanding, Landed, StagingBuffers, Ticket
from kv_transfer.wire import decode_header, digest_of, encode
from kv_transfer.wire_format import WireFormat
from pdserve.kv_layout import KvLayout
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.types import HandoffId

LAYOUT = KvLayout(dtype="float32", block_size=16, num_layers=2, num_kv_heads=1, head_dim=4)
PLAN = ChunkPlan.make(48, LAYOUT, LAYOUT.block_nbytes)
BLOCKS = (4, 1, 6)
LINK = LinkId("p", 1)


class Staged:
    """A store that cannot be received into."""

    def __init__(self, store: NumpyBlockStore) -> None:
        self._io = decode_io(store, WireFormat.like(LAYOUT))
        self.error: Exception | None = None

    def read(self, blocks: tuple[int, ...], chunk: Chunk) -> list[memoryview]:
        return self._io.read(blocks, chunk)

    def views(self, blocks: tuple[int, ...], chunk: Chunk) -> list[memoryview] | None:
        return None

    def write(self, blocks: tuple[int, ...], chunk: Chunk, payload: memoryview) -> None:
        if self.error is not None:
            raise self.error
        self._io.write(blocks, chunk, payload)


class Rig:
    """One ticket, over a store that can be received into or not."""

    def __init__(self, *, staged: bool = False) -> None:
        self.store = NumpyBlockStore(LAYOUT, 8)
        self.staged = Staged(self.store)
        self.buffers = StagingBuffers()
        self.reports: list[Landed] = []
        self.ticket = Ticket(
            handoff=HandoffId("r", 1),
            nonce=7,
            link=LINK,
            plan=PLAN,
            blocks=BLOCKS,
            io=self.staged if staged else decode_io(self.store, WireFormat.like(LAYOUT)),  # type: ignore[arg-type]
            buffers=self.buffers,
            report=self.reports.append,
        )

    def content(self, seed: int) -> bytes:
        return np.random.default_rng(seed).integers(0, 256, LAYOUT.block_nbytes, dtype=np.uint8).tobytes()

    def claim(self, seq: int, content: bytes, *, link: LinkId = LINK, attempt: int = 1) -> ChunkLanding | None:
        header = encode(PLAN.header(seq, nonce=7, attempt=attempt), [memoryview(content)]).header
        return self.ticket.claim("t", link, *decode_header(header))

    def write(self, landing: ChunkLanding, content: bytes) -> bool:
        """Whether the content was wanted."""
        with landing.writing() as pieces:
            if pieces is None:
                return False
            at = 0
            for piece in pieces:
                piece[:] = content[at : at + piece.nbytes]
                at += piece.nbytes
            return True

    def finish(self, seq: int, landing: ChunkLanding, content: bytes) -> None:
        header = encode(PLAN.header(seq, nonce=7, attempt=1), [memoryview(content)]).header
        digest = digest_of(header)
        digest.update(content)
        landing.finish(digest.intdigest())

    @property
    def faults(self) -> list[str | None]:
        return [report.fault for report in self.reports]


@pytest.fixture(params=[False, True], ids=["in place", "staged"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(staged=request.param)


def test_a_payload_ends_up_in_its_block_and_is_reported_once(rig: Rig) -> None:
    content = rig.content(1)
    landing = rig.claim(2, content)
    assert landing is not None and rig.write(landing, content)
    assert not rig.reports
    rig.finish(2, landing, content)
    assert rig.store.content([BLOCKS[2]]) == content
    assert not any(rig.store.content([b for b in range(8) if b != BLOCKS[2]]))
    assert rig.reports == [Landed("t", LINK, 7, 2, LAYOUT.block_nbytes, None)]


def test_nothing_is_written_after_the_reservation_has_ended(rig: Rig) -> None:
    """O-ABT-3."""
    content = rig.content(1)
    landing = rig.claim(0, content)
    assert landing is not None
    rig.ticket.close()
    assert not rig.write(landing, content)
    rig.finish(0, landing, content)
    assert not rig.reports and not rig.store.data.any()
    assert rig.claim(1, content) is None


def test_the_end_of_a_reservation_waits_for_a_copy_that_is_under_way() -> None:
    rig = Rig()
    landing = rig.claim(0, rig.content(1))
    assert landing is not None
    closed = threading.Event()

    def close() -> None:
        rig.ticket.close()
        closed.set()

    with landing.writing() as pieces:
        assert pieces is not None
        closing = threading.Thread(target=close)
        closing.start()
        assert not closed.wait(0.05)
    assert closed.wait(5)
    closing.join()


def test_a_chunk_that_is_in_place_is_never_written_again(rig: Rig) -> None:
    content = rig.content(1)
    landing = rig.claim(0, content)
    assert landing is not None
    rig.write(landing, content)
    rig.finish(0, landing, content)
    assert rig.claim(0, content) is None
    assert [report.repeated for report in rig.reports] == [False, True]
    rig.ticket.close()
    assert rig.claim(0, content) is None
    assert len(rig.reports) == 3, "its acknowledgement may have been lost"


def test_the_newest_copy_of_a_chunk_counts_and_an_older_one_writes_nothing_more(rig: Rig) -> None:
    """The older one may be stuck in a transport that was given up, and come to life at any time."""
    old, new = rig.content(1), rig.content(2)
    first = rig.claim(0, old)
    assert first is not None and rig.write(first, old)
    second = rig.claim(0, new)
    assert second is not None
    assert not rig.write(first, old)
    assert rig.write(second, new)
    rig.finish(0, first, old)
    assert not rig.reports
    rig.finish(0, second, new)
    assert rig.faults == [None] and rig.store.content([BLOCKS[0]]) == new


def test_a_whole_frame_ends_a_copy_that_is_under_way(rig: Rig) -> None:
    old, new = rig.content(1), rig.content(2)
    landing = rig.claim(0, old)
    assert landing is not None and rig.write(landing, old)
    rig.ticket.place(0, memoryview(new))
    assert not rig.write(landing, old)
    rig.finish(0, landing, old)
    assert rig.store.content([BLOCKS[0]]) == new and not rig.reports
    assert rig.claim(0, new) is None, "it is in place"


def test_a_damaged_payload_is_reported_and_may_come_again(rig: Rig) -> None:
    content = rig.content(1)
    landing = rig.claim(0, content)
    assert landing is not None
    rig.write(landing, content[:-1] + b"x")
    landing.finish(xxhash.xxh3_64_intdigest(b"something else"))
    assert rig.faults == ["checksum differs"]
    again = rig.claim(0, content)
    assert again is not None
    rig.write(again, content)
    rig.finish(0, again, content)
    assert rig.faults[1:] == [None] and rig.store.content([BLOCKS[0]]) == content


def test_an_abandoned_copy_makes_room_for_the_next(rig: Rig) -> None:
    content = rig.content(1)
    landing = rig.claim(0, content)
    assert landing is not None
    landing.fail("the connection broke")
    landing.fail("told twice")
    assert not rig.write(landing, content) and not rig.reports
    assert rig.claim(0, content) is not None


def test_what_does_not_fit_the_ticket_is_refused_with_the_reason() -> None:
    rig = Rig()
    content = rig.content(1)
    assert rig.claim(0, content, attempt=2) is None
    assert rig.claim(0, content, link=LinkId("p", 2)) is None
    header = replace(PLAN.header(1, nonce=7, attempt=1), token_begin=0, token_end=16)
    assert rig.ticket.claim("t", LINK, header, 0) is None
    header = replace(PLAN.header(1, nonce=7, attempt=1), seq=99)
    assert rig.ticket.claim("t", LINK, header, 0) is None
    words = ("attempt 2", "link p/2", "not what the plan says", "no such chunk")
    for fault, word in zip(rig.faults, words, strict=True):
        assert fault is not None and word in fault
    assert not rig.store.data.any()


@pytest.mark.parametrize("error", [PayloadError("a scale is not a number"), ValueError("wrong length")])
def test_a_payload_that_cannot_be_stored_is_reported_and_not_counted(error: Exception) -> None:
    rig = Rig(staged=True)
    rig.staged.error = error
    content = rig.content(1)
    landing = rig.claim(0, content)
    assert landing is not None
    rig.write(landing, content)
    rig.finish(0, landing, content)
    (fault,) = rig.faults
    assert fault is not None and str(error) in fault
    assert rig.claim(0, content) is not None


def test_staging_memory_is_used_again_and_bounded() -> None:
    buffers = StagingBuffers()
    taken = [buffers.take(1000) for _ in range(20)]
    assert len({id(buffer) for buffer in taken}) == 20
    for buffer in taken:
        buffers.give(buffer)
    again = [buffers.take(1000) for _ in range(20)]
    assert sum(any(buffer is old for old in taken) for buffer in again) == 8
    assert len(buffers.take(2000)) == 2000
