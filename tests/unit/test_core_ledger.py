"""Workers of one machine use each other's cores while these are idle, and give them back."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pdserve.core_ledger import LINGER_NS, LOST_NS, CoreLedger, create_ledger
from pdserve.errors import ConfigError


class Clock:
    """Nanoseconds."""

    now = 1_000_000_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ledgers(path: Path, clock: Clock, shares: list[int], num_cores: int) -> list[CoreLedger]:
    create_ledger(path / "cores", len(shares))
    return [
        CoreLedger(path / "cores", slot, share=share, num_cores=num_cores, now_ns=clock)
        for slot, share in enumerate(shares)
    ]


def test_whoever_computes_alone_has_all_cores_and_two_have_their_shares(tmp_path: Path, clock: Clock) -> None:
    prefill, decode = ledgers(tmp_path, clock, [1, 1], 2)
    assert prefill.most == decode.most == 2
    assert prefill.step_begins() == 2
    assert decode.step_begins() == 1
    prefill.step_ended()
    assert prefill.step_begins() == 1
    decode.step_ended()
    prefill.step_ended()
    clock.now += LINGER_NS
    assert decode.step_begins() == 2


def test_a_worker_between_two_steps_still_counts(tmp_path: Path, clock: Clock) -> None:
    prefill, decode = ledgers(tmp_path, clock, [1, 1], 2)
    decode.step_begins()
    decode.step_ended()
    clock.now += LINGER_NS - 1
    assert prefill.step_begins() == 1
    clock.now += 1
    assert prefill.step_begins() == 2


def test_a_worker_that_was_killed_in_a_step_does_not_count_for_ever(tmp_path: Path, clock: Clock) -> None:
    prefill, decode = ledgers(tmp_path, clock, [1, 1], 2)
    prefill.step_begins()
    clock.now += LOST_NS - 1
    assert decode.step_begins() == 1
    clock.now += 1
    assert decode.step_begins() == 2


def test_what_a_process_has_left_is_wiped_by_the_one_that_takes_its_place(tmp_path: Path, clock: Clock) -> None:
    prefill, decode = ledgers(tmp_path, clock, [1, 1], 2)
    prefill.step_begins()
    CoreLedger(tmp_path / "cores", 0, share=1, num_cores=2, now_ns=clock)
    assert decode.step_begins() == 2


def test_those_that_compute_share_what_others_leave(tmp_path: Path, clock: Clock) -> None:
    one, two, three, _ = ledgers(tmp_path, clock, [2, 2, 2, 2], 8)
    assert one.step_begins() == 8
    assert two.step_begins() == 4
    one.step_ended()
    assert one.step_begins() == 4
    assert three.step_begins() == 2
    assert two.step_begins() == 2


@pytest.mark.parametrize(("shares", "num_cores"), [([1, 1, 1, 1], 2), ([4, 4], 6)])
def test_nobody_ever_has_less_than_its_share(tmp_path: Path, clock: Clock, shares: list[int], num_cores: int) -> None:
    workers = ledgers(tmp_path, clock, shares, num_cores)
    for _ in range(2):
        threads = [worker.step_begins() for worker in workers]
    assert threads == shares


def test_the_file_is_for_its_owner_alone_and_never_taken_over(tmp_path: Path) -> None:
    create_ledger(tmp_path / "cores", 2)
    assert stat.S_IMODE((tmp_path / "cores").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        create_ledger(tmp_path / "cores", 2)


def test_a_place_that_is_not_there_is_refused_by_its_setting(tmp_path: Path) -> None:
    create_ledger(tmp_path / "cores", 2)
    (tmp_path / "empty").touch()
    for name in ("nothing", "empty"):
        with pytest.raises(ConfigError, match=rf"engine\.core_ledger\.file: .*{name}"):
            CoreLedger(tmp_path / name, 0, share=1, num_cores=2)
    with pytest.raises(ConfigError, match=r"engine\.core_ledger\.slot: .* lines for 2 workers, not one of number 2"):
        CoreLedger(tmp_path / "cores", 2, share=1, num_cores=2)
