"""A deployment's worth of fake workers, registered in redis as real ones are."""

from __future__ import annotations

from pdserve.store.client import Store
from pdserve.store.registry import WorkerRegistration
from pdserve.testing.fake_worker_base import NextToken, fake_info
from pdserve.testing.fake_workers import FakeDecodeWorker, FakePrefillWorker
from pdserve.types import Role, WorkerStats
from pdserve.worker_info import WorkerInfo

_LEASE_S = 60.0


class FakeFleet:
    """Starts, kills and restarts fake workers. Close it at the end."""

    def __init__(
        self, store: Store, *, model: str, model_fingerprint: str, next_token: NextToken, seeded: bool = False
    ) -> None:
        """`seeded`: the next token depends on the seed, too."""
        self._store = store
        self._seeded = seeded
        self._model = model
        self._fingerprint = model_fingerprint
        self._next_token = next_token
        self.prefill: dict[str, FakePrefillWorker] = {}
        self.decode: dict[str, FakeDecodeWorker] = {}
        self._registrations: dict[str, WorkerRegistration] = {}

    async def add_prefill(self, worker_id: str, info: WorkerInfo | None = None) -> FakePrefillWorker:
        """Start and register a prefill worker; `info` to claim something unusual."""
        worker = FakePrefillWorker(info or self.info(worker_id, Role.PREFILL), self._next_token, self.decode.get)
        worker.seeded = self._seeded
        await self._announce(await worker.start())
        self.prefill[worker_id] = worker
        return worker

    async def add_decode(self, worker_id: str, info: WorkerInfo | None = None) -> FakeDecodeWorker:
        """Start and register a decode worker."""
        worker = FakeDecodeWorker(info or self.info(worker_id, Role.DECODE), self._next_token)
        worker.seeded = self._seeded
        worker.peers = self.decode.get
        await self._announce(await worker.start())
        self.decode[worker_id] = worker
        return worker

    async def kill(self, worker_id: str) -> None:
        """As SIGKILL: the registration stays until its lease ends."""
        worker = self.prefill.pop(worker_id, None) or self.decode.pop(worker_id)
        await worker.kill()

    async def deregister(self, worker_id: str) -> None:
        """As a worker does that is about to stop."""
        await self._registrations.pop(worker_id).deregister()

    def info(
        self,
        worker_id: str,
        role: Role,
        *,
        num_blocks: int = 4096,
        model_fingerprint: str | None = None,
        kv_dtype: str = "float32",
        prefill_chunk_tokens: int = 0,
    ) -> WorkerInfo:
        """Who a worker of this fleet claims to be."""
        return fake_info(
            worker_id,
            role,
            model=self._model,
            model_fingerprint=model_fingerprint or self._fingerprint,
            num_blocks=num_blocks,
            kv_dtype=kv_dtype,
            prefill_chunk_tokens=prefill_chunk_tokens,
        )

    async def aclose(self) -> None:
        """Kill everybody."""
        for worker_id in [*self.prefill, *self.decode]:
            await self.kill(worker_id)

    async def _announce(self, info: WorkerInfo) -> None:
        registration = WorkerRegistration(self._store, info, lease_s=_LEASE_S)
        await registration.register(WorkerStats())
        self._registrations[info.worker_id] = registration
