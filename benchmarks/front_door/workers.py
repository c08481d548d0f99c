"""A prefill and a decode worker without a model, in a process of their own.

`python -m benchmarks.front_door.workers SETTINGS`. The decode worker steps as a real one does: a token for every
sequence at each beat, all of them in one message.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.front_door.child import serve
from benchmarks.front_door.text import output_ids
from pdserve.model.source import open_model
from pdserve.rpc.codec import finish_to_proto
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.store.client import Store
from pdserve.store.registry import WorkerRegistration
from pdserve.testing.fake_worker_base import NextToken, fake_info
from pdserve.testing.fake_workers import FakeDecodeWorker, FakePrefillWorker
from pdserve.tokenizer import load_tokenizer
from pdserve.types import GenerationJob, Role, WorkerStats
from pdserve.worker_info import WorkerInfo

HEARTBEAT_S = 1.0
LEASE_S = 600.0
"""Longer than any run, which is not about leases."""


class SteppingDecodeWorker(FakeDecodeWorker):
    """One message per step and router."""

    def __init__(self, info: WorkerInfo, next_token: NextToken, token_ids: Sequence[int]) -> None:
        super().__init__(info, next_token, HEARTBEAT_S)
        self.period_s = 0.02
        self.num_tokens = 0
        """Sent so far."""
        self._token_ids = token_ids
        self._sequences: dict[tuple[str, int], tuple[GenerationJob, int]] = {}
        """Jobs and the index of their next token."""

    def take_over(self, job: GenerationJob, first_token: int) -> None:
        """See FakeDecodeWorker."""
        self._sequences[job.request_id, job.attempt] = (job, job.first_output_index + 1)

    async def step_for_ever(self) -> None:
        """One step after the other, `period_s` apart."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            due = max(due + self.period_s, clock())
            await asyncio.sleep(due - clock())
            self._step()

    def _step(self) -> None:
        by_router: dict[str, tuple[pb.StepBatch, list[pb.DecodeEvent]]] = {}
        for key, (job, index) in list(self._sequences.items()):
            token = self._token_ids[index % len(self._token_ids)]
            finish = job.finish_reason(index, token)
            if finish is None:
                self._sequences[key] = (job, index + 1)
            else:
                del self._sequences[key]
            batch, events = by_router.setdefault(job.router_id, (pb.StepBatch(), []))
            if finish is None:
                batch.request_ids.append(job.request_id)
                batch.attempts.append(job.attempt)
                batch.first_indices.append(index)
                batch.token_ids.append(token)
            else:
                tokens = pb.StepTokens(
                    request_id=job.request_id, attempt=job.attempt, first_index=index, token_ids=(token,),
                    finish_reason=finish_to_proto(finish),
                )  # fmt: skip
                events.append(pb.DecodeEvent(tokens=tokens))
            self.num_tokens += 1
        for router_id, (batch, events) in by_router.items():
            self._emit(router_id, pb.DecodeEvents(step=batch, events=events))

    def _cancel(self, cancel: pb.CancelJob) -> None:
        self._sequences.pop((cancel.request_id, cancel.attempt), None)
        super()._cancel(cancel)


class TimedPrefillWorker(FakePrefillWorker):
    """Knows when its jobs have come."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arrivals_s: list[float] = []
        """By the system's monotonic clock, which all processes share."""

    def _on_submit(self, command: pb.PrefillCommand) -> None:
        self.arrivals_s.append(time.monotonic())
        super()._on_submit(command)


async def run(settings: dict[str, Any]) -> None:
    """Register both workers and obey the parent."""
    source = open_model(settings["model"])
    token_ids = output_ids(load_tokenizer(source))
    store = await Store.connect(settings["store_url"], settings["cluster"], timeout_s=5.0)

    def info(worker_id: str, role: Role) -> WorkerInfo:
        return fake_info(worker_id, role, model=source.name, model_fingerprint=source.fingerprint, num_blocks=1 << 20)

    def next_token(so_far: Sequence[int]) -> int:
        return token_ids[0]

    decode = SteppingDecodeWorker(info("d0", Role.DECODE), next_token, token_ids)
    prefill = TimedPrefillWorker(info("p0", Role.PREFILL), next_token, {"d0": decode}.get, HEARTBEAT_S)
    addresses = {}
    for worker in (decode, prefill):
        started = await worker.start()
        addresses[started.worker_id] = started.address
        await WorkerRegistration(store, started, lease_s=LEASE_S).register(WorkerStats())
    stepping = asyncio.create_task(decode.step_for_ever())

    async def addresses_of(_: dict[str, Any]) -> dict[str, Any]:
        return addresses

    async def pace(arguments: dict[str, Any]) -> dict[str, Any]:
        decode.period_s = arguments["period_s"]
        return {}

    async def arrivals(_: dict[str, Any]) -> dict[str, Any]:
        taken, prefill.arrivals_s = prefill.arrivals_s, []
        return {"seconds": taken}

    async def hold(_: dict[str, Any]) -> dict[str, Any]:
        prefill.before_first_token.hold()
        return {}

    async def release(_: dict[str, Any]) -> dict[str, Any]:
        prefill.before_first_token.release()
        return {}

    async def count(_: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": decode.num_tokens, "held": prefill.before_first_token.num_waiting}

    await serve(
        {
            "addresses": addresses_of, "pace": pace, "hold": hold, "release": release, "count": count,
            "arrivals": arrivals,
        }
    )  # fmt: skip
    stepping.cancel()
    for worker in (decode, prefill):
        await worker.kill()
    await store.aclose()


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
