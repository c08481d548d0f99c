"""How two workers form a pair of the `torch` transport over the store of one of them, with the group played."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import cast

import pytest
import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from kv_transfer.messages import LinkId
from kv_transfer.transports import torch_join
from kv_transfer.transports.torch_channel import DECODE_RANK, PREFILL_RANK, Channel, PairError
from kv_transfer.transports.torch_join import GLOO, Side, join_as_decode, join_as_prefill
from kv_transfer.transports.torch_rendezvous import PairStore, pair_name


def test_the_store_is_not_cleared_while_the_prefill_worker_still_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode worker is often connected first. gloo crashes on an address that is removed while it is looked for."""
    may_go_on = threading.Event()
    channel = cast(Channel, object())

    def form(side: Side, store: Store, name: str, backend: str) -> Channel:
        PrefixStore(name, store).set(f"0/{side.rank}", "address")
        if side.rank == PREFILL_RANK:
            assert may_go_on.wait(10.0)
        return channel

    monkeypatch.setattr(torch_join, "_form", form)
    store, name = PairStore("127.0.0.1", 10.0), pair_name("d", LinkId("p", 1))
    prefill, decode = (Side(rank, "127.0.0.1", torch.device("cpu"), 10.0) for rank in (PREFILL_RANK, DECODE_RANK))
    with ThreadPoolExecutor(2) as threads:
        joining: list[Future[Channel | None]] = [
            threads.submit(lambda: join_as_prefill(prefill, f"127.0.0.1:{store.port}", name, GLOO)),
            threads.submit(lambda: join_as_decode(decode, store, name, GLOO, lambda: False)),
        ]
        left = PrefixStore(name, store.client())
        left.wait(["0/0", "0/1"])
        assert wait(joining, timeout=0.2).done == set()
        assert left.check(["0/0", "0/1"])
        may_go_on.set()
        assert [one.result(10.0) for one in joining] == [channel, channel]
    assert store.client().num_keys() == 0


def test_a_prefill_worker_that_fails_does_not_keep_the_decode_worker_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def form(side: Side, store: Store, name: str, backend: str) -> Channel:
        raise PairError("no network")

    monkeypatch.setattr(torch_join, "_form", form)
    store, name = PairStore("127.0.0.1", 30.0), pair_name("d", LinkId("p", 1))
    prefill, decode = (Side(rank, "127.0.0.1", torch.device("cpu"), 30.0) for rank in (PREFILL_RANK, DECODE_RANK))
    with ThreadPoolExecutor(2) as threads:
        joining: list[Future[Channel | None]] = [
            threads.submit(lambda: join_as_prefill(prefill, f"127.0.0.1:{store.port}", name, GLOO)),
            threads.submit(lambda: join_as_decode(decode, store, name, GLOO, lambda: False)),
        ]
        assert wait(joining, timeout=10.0).not_done == set()
        for one in joining:
            with pytest.raises(PairError, match="no network"):
                one.result()
    assert store.client().num_keys() == 0


class _Deaf:
    """A store that nobody reaches."""

    def clone(self) -> Store:
        raise RuntimeError("timed out after 2000 ms\nC++ stack trace")


def test_a_store_that_does_not_answer_is_an_error_of_the_pair(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = PairStore("127.0.0.1", 5.0)
    monkeypatch.setattr(store, "_store", _Deaf())
    with pytest.raises(PairError, match=r"^our own store: timed out after 2000 ms$"):
        join_as_decode(Side(DECODE_RANK, "127.0.0.1", torch.device("cpu"), 5.0), store, "pair", GLOO, lambda: False)
    store.forget("pair")
    assert "what is left of a pair stays in our store" in caplog.text
