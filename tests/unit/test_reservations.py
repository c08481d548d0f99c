"""The branches of joint jobs at the decode worker's side of the hand-off: fenced together, and then one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from kv_transfer import Busy, Room
from kv_transfer.chunk_io import decode_io
from kv_transfer.decode_states import (
    ChunkArrived,
    CommitArrived,
    DecodeFinished,
    DecodeTimers,
    LinkDown,
    LocalCancel,
    PeerDead,
    ReserveArrived,
)
from kv_transfer.messages import ENDED, Commit, CommitAck, Gone, Grant, LinkId, ProbeAck, Reserve, ToPrefill
from kv_transfer.plan import ChunkPlan
from kv_transfer.reservations import Origin, Reservations
from kv_transfer.wire_format import negotiate
from pdserve.kv_layout import KvLayout
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.types import Fork, GenerationJob, HandoffId, HandoffPurpose

LAYOUT = KvLayout(dtype="float32", block_size=16, num_layers=1, num_kv_heads=1, head_dim=4)
NUM_TOKENS = 20
LEAD, SECOND, THIRD = (HandoffId(name, 1) for name in ("a", "a-1", "a-2"))


def job(key: HandoffId, *forks: HandoffId) -> GenerationJob:
    return GenerationJob(
        request_id=key.request_id,
        attempt=key.attempt,
        router_id="r",
        token_ids=tuple(range(NUM_TOKENS)),
        num_prompt_tokens=NUM_TOKENS,
        max_new_tokens=8,
        forks=tuple(Fork(request_id=f.request_id, attempt=f.attempt, seed=0) for f in forks),
    )


JOINT = job(LEAD, SECOND, THIRD)


class World:
    """Reservations with an admission that says yes and writes down what it is told, and one link."""

    def __init__(self) -> None:
        store = NumpyBlockStore(LAYOUT, 8)
        self.calls: list[tuple[object, ...]] = []
        self.sent: list[ToPrefill | ProbeAck] = []
        self.reservations = Reservations(
            store=store,
            admission=self,
            timers=DecodeTimers(
                lease_s=10, max_reservation_s=100, quarantine_s=10, tombstone_s=1e9, credit_bytes=1 << 20
            ),
            max_tokens=1000,
            send=lambda _, message: self.sent.append(message),
            fence=lambda _: None,
        )
        wire = negotiate(LAYOUT, LAYOUT, "none")
        self.link = LinkId("p", 1)
        self.origin = Origin(
            link=self.link, one_sided=False, wire=wire, io=decode_io(store, wire), target_chunk_bytes=1 << 20,
            tail_tokens=0,
        )  # fmt: skip
        self.plan = ChunkPlan.make(NUM_TOKENS, wire.layout, 1 << 20, tail_tokens=0).on(wire)
        self.reservations.origins[self.link] = self.origin
        self._blocks: Iterator[int] = count()

    # Admission

    def reserve(self, job: HandoffPurpose, handoff: HandoffId, num_tokens: int) -> Room | Busy:
        self.calls.append(("reserve", handoff))
        return Room((next(self._blocks), next(self._blocks)), 0)

    def release(self, handoff: HandoffId) -> None:
        self.calls.append(("release", handoff))

    def commit(self, handoff: HandoffId, first_tokens: tuple[int, ...], *, exact: bool) -> None:
        self.calls.append(("commit", handoff, first_tokens))

    def supersede(self, handoff: HandoffId) -> None:
        self.calls.append(("supersede", handoff))

    # Events

    def ask(self, job: GenerationJob) -> Grant | Gone:
        """A Reserve; gives the answer."""
        key = HandoffId(job.request_id, job.attempt)
        newest = self.reservations.newest_attempt(key.request_id)
        message = Reserve(key, job, NUM_TOKENS, self.plan.plan_hash)
        self.reservations.apply(key, ReserveArrived(message, self.link, newest), self.origin)
        answer = self.sent[-1]
        assert isinstance(answer, Grant | Gone)
        return answer

    def commit_all(self, job: GenerationJob, *tokens: int) -> None:
        """Reserve, all chunks, Commit."""
        grant = self.ask(job)
        assert isinstance(grant, Grant)
        self.fill(grant)
        event = CommitArrived(Commit(grant.id, grant.nonce, tokens), self.link)
        self.reservations.apply(grant.id, event, self.origin)
        assert isinstance(self.sent[-1], CommitAck)

    def fill(self, grant: Grant) -> None:
        """All chunks are in their places."""
        for seq in range(self.plan.num_chunks):
            nbytes = self.plan.chunk(seq).nbytes
            event = ChunkArrived(grant.nonce, self.link, seq, nbytes, None, in_place=True)
            self.reservations.apply(grant.id, event, self.origin)

    def told(self) -> list[tuple[object, ...]]:
        """What the worker was told since the last call."""
        calls, self.calls = self.calls, []
        return calls


def test_branches_of_a_committed_hand_off_are_superseded_and_finished_alone() -> None:
    w = World()
    w.commit_all(JOINT, 5, 6, ENDED)
    assert w.told() == [("reserve", LEAD), ("commit", LEAD, (5, 6, ENDED))]
    for branch in (LEAD, SECOND, THIRD):
        assert w.reservations.newest_attempt(branch.request_id) == 1
    w.reservations.apply(THIRD, DecodeFinished())
    w.reservations.apply(LEAD, DecodeFinished())
    w.ask(job(HandoffId("a-1", 2)))
    assert w.told() == [("supersede", SECOND), ("reserve", HandoffId("a-1", 2))]
    w.reservations.apply(SECOND, DecodeFinished())
    w.ask(job(HandoffId("a", 2)))
    assert w.told() == [("reserve", HandoffId("a", 2))], "it has ended"


def test_newer_attempt_of_any_branch_ends_that_branch_of_a_hand_off_that_is_being_filled() -> None:
    for branch in (LEAD, SECOND, THIRD):
        w = World()
        grant = w.ask(JOINT)
        w.told()
        newer = HandoffId(branch.request_id, 2)
        w.ask(job(newer))
        assert w.told() == [("supersede", branch), ("reserve", newer)]
        assert isinstance(grant, Grant)
        w.fill(grant)
        w.reservations.apply(LEAD, CommitArrived(Commit(LEAD, grant.nonce, (5, 6, 7)), w.link), w.origin)
        assert w.told() == [("commit", LEAD, (5, 6, 7))], "the hand-off goes on for the others"


@pytest.mark.parametrize("early", ["cancelled", "newer attempt"])
def test_branch_that_has_ended_before_the_joint_job_comes_does_not_begin(early: str) -> None:
    w = World()
    if early == "cancelled":
        w.reservations.apply(SECOND, LocalCancel())
    else:
        w.ask(job(HandoffId("a-1", 2)))
    w.told()
    w.commit_all(JOINT, 5, 6, 7)
    assert w.told() == [("reserve", LEAD), ("supersede", SECOND), ("commit", LEAD, (5, 6, 7))]
    w.reservations.apply(SECOND, DecodeFinished())  # the worker tells of the end of every branch


def test_joint_job_whose_first_branch_has_a_newer_attempt_is_refused() -> None:
    w = World()
    w.ask(job(HandoffId("a", 2)))
    answer = w.ask(JOINT)
    assert isinstance(answer, Gone) and answer.code == "stale_attempt"


def test_branches_of_a_hand_off_that_has_failed_are_forgotten_with_it() -> None:
    w = World()
    w.ask(JOINT)
    w.reservations.apply(LEAD, LinkDown())
    w.reservations.apply(LEAD, PeerDead())
    assert w.told() == [("reserve", LEAD), ("release", LEAD)]
    w.ask(job(HandoffId("a-1", 2)))
    assert w.told() == [("reserve", HandoffId("a-1", 2))]


def test_joint_job_ends_older_attempts_of_all_its_branches() -> None:
    w = World()
    w.commit_all(job(SECOND), 5)
    w.told()
    w.ask(job(HandoffId("a", 1), HandoffId("a-1", 2)))
    assert w.told() == [("supersede", SECOND), ("reserve", LEAD)]


@pytest.mark.parametrize("tokens", [(5,), (5, 6), (5, 6, 7, 8)])
def test_commit_with_another_number_of_tokens_than_branches_ends_the_hand_off(tokens: tuple[int, ...]) -> None:
    w = World()
    grant = w.ask(JOINT)
    assert isinstance(grant, Grant)
    w.fill(grant)
    w.reservations.apply(LEAD, CommitArrived(Commit(LEAD, grant.nonce, tokens), w.link), w.origin)
    assert w.told() == [("reserve", LEAD), ("release", LEAD)]
    (gone,) = [message for message in w.sent if isinstance(message, Gone)]
    assert gone.code == "handoff_failed" and "3 outputs" in gone.message
