"""The router process: brings the parts up in order, keeps their tasks, and takes them down in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Final

from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.logs import configure_logging
from pdserve.model.source import ModelSource, open_model
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.service import GrpcEndpoint, run_service
from pdserve.store.client import Store, require_shared
from pdserve.store.journal import RequestJournal
from pdserve.store.registry import WorkerDirectory
from pdserve.store.requests import RequestRecords
from pdserve.tokenizer import Tokenizer, load_tokenizer
from router.api import ClusterServicer, InferenceServicer
from router.core import RouterCore, ServedModel
from router.http.app import make_app
from router.http.server import HttpEndpoint
from router.prefix_memory import PrefixMemory
from router.prompts import Prompts
from router.request import RequestServices
from router.requests import RequestTable
from router.worker_pool import ModelIdentity, WorkerPool

log = logging.getLogger(__name__)

SERVICE_NAMES: Final = ("pdserve.rpc.v1.Inference", "pdserve.rpc.v1.Cluster")

FLUSH_S: Final = 2.0
"""Longest wait for the last records to reach redis when stopping."""

ABORT_S: Final = 1.0
"""Longest wait for clients to take the errors of requests that were ended by the stop."""


class RouterService:
    """See pdserve.service.Service."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.router_id = config.router.router_id or f"router-{secrets.token_hex(4)}"
        self._undo = contextlib.AsyncExitStack()
        self._endpoint: GrpcEndpoint | None = None
        self._http: HttpEndpoint | None = None
        self._table: RequestTable | None = None
        self._pool: WorkerPool | None = None
        self._journal: RequestJournal | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port of the public API, once started."""
        assert self._endpoint is not None, "not started"
        return self._endpoint.address

    @property
    def http_address(self) -> str:
        """host:port of the HTTP API, once started."""
        assert self._http is not None, "not started, or HTTP is off"
        return self._http.address

    @property
    def pool(self) -> WorkerPool:
        """The workers, once started."""
        assert self._pool is not None, "not started"
        return self._pool

    async def start(self) -> None:
        """Listen. Ready, as health says it, only when a pair of workers is.

        Raises ModelLoadError, StoreError or ConfigError.
        """
        config = self._config
        started_at = time.monotonic()
        require_shared(config.store.url)
        # The port early: a taken one is a mistake that is cheap to find.
        endpoint = self._endpoint = GrpcEndpoint(config.router.listen, "router.listen")
        self._undo.push_async_callback(endpoint.stop, 0.0)
        if config.router.http_listen is not None:
            self._http = HttpEndpoint(config.router)
            self._undo.push_async_callback(self._http.stop, 0.0)
        store = await Store.connect(config.store.url, config.cluster, timeout_s=config.store.timeout_s)
        self._undo.push_async_callback(store.aclose)
        source, tokenizer, fingerprint = await asyncio.to_thread(_load, config.model.path)
        model = _served_model(config, source)

        records = RequestRecords(store, retention_s=config.store.record_ttl_s)
        journal = self._journal = RequestJournal(records, owner=self.router_id)
        prompts = Prompts(tokenizer)
        self._undo.callback(prompts.close)
        pool = self._pool = WorkerPool(
            router_id=self.router_id, model=ModelIdentity(model.name, fingerprint), health=config.health
        )
        self._undo.push_async_callback(pool.aclose)
        table = self._table = RequestTable(
            RequestServices(
                router_id=self.router_id,
                model=model.name,
                config=config.router,
                pool=pool,
                journal=journal,
                tokenizer=tokenizer,
                prefixes=PrefixMemory(fingerprint),
            )
        )
        directory = WorkerDirectory(store)
        core = RouterCore(model=model, prompts=prompts, table=table, pool=pool, records=records, config=config.router)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(core), endpoint.server)
        inference_pb2_grpc.add_ClusterServicer_to_server(
            ClusterServicer(
                router_id=self.router_id,
                table=table,
                pool=pool,
                store_available=lambda: directory.available and not journal.degraded,
            ),
            endpoint.server,
        )
        await endpoint.start(SERVICE_NAMES)
        self._undo.push_async_callback(endpoint.stop, ABORT_S)
        if self._http is not None:
            await self._http.start(make_app(core))
            self._undo.push_async_callback(self._http.stop, ABORT_S)
        self._undo.callback(table.close)
        self._supervisor = asyncio.create_task(
            self._supervise(directory, pool, table, journal, endpoint), name="router"
        )
        self._undo.push_async_callback(self._stop_supervisor)
        log.info(
            "listening",
            extra={
                "router_id": self.router_id,
                "address": endpoint.address,
                "http_address": self._http.address if self._http is not None else None,
                "model": model.name,
                "max_model_len": model.max_model_len,
                "start_ms": round((time.monotonic() - started_at) * 1000),
            },
        )

    async def run(self) -> None:
        """Return never; raise what ended a background task, which is a bug."""
        assert self._supervisor is not None, "not started"
        await asyncio.shield(self._supervisor)

    async def drain(self) -> None:
        """Refuse new requests, let the others finish, end what takes too long, write the last records."""
        assert self._endpoint is not None and self._table is not None and self._journal is not None, "not started"
        await self._endpoint.set_ready(False)
        num_ended = await self._table.drain(self._config.router.drain_timeout_s)
        num_unwritten = await self._journal.flush(FLUSH_S)
        log.info(
            "drained",
            extra={
                "requests_ended": num_ended,
                "records_not_written": num_unwritten,
                "stale_events": self.pool.num_stale_events,
            },
        )

    async def stop(self) -> None:
        """Release everything; also after a failed start."""
        await self._undo.aclose()
        if self._pool is not None:
            log.info("stopped", extra={"router_id": self.router_id})

    async def _supervise(
        self,
        directory: WorkerDirectory,
        pool: WorkerPool,
        table: RequestTable,
        journal: RequestJournal,
        endpoint: GrpcEndpoint,
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(journal.run())
            tasks.create_task(self._follow_registry(directory, pool))
            tasks.create_task(self._show_readiness(pool, table, endpoint))
            tasks.create_task(pool.wait_for_failure())
            if self._http is not None:
                tasks.create_task(self._http.run())

    async def _follow_registry(self, directory: WorkerDirectory, pool: WorkerPool) -> None:
        store = self._config.store
        async for change in directory.watch(poll_s=store.poll_s, resync_s=store.lease_ttl_s):
            pool.apply(change)

    async def _show_readiness(self, pool: WorkerPool, table: RequestTable, endpoint: GrpcEndpoint) -> None:
        changed = asyncio.Event()
        pool.watch(changed.set)
        shown = False
        while True:
            await changed.wait()
            changed.clear()
            ready = pool.has_usable_pair and not table.closed
            if ready is not shown:
                await endpoint.set_ready(ready)
                log.info("ready" if ready else "not ready: no usable pair of workers")
                shown = ready

    async def _stop_supervisor(self) -> None:
        assert self._supervisor is not None, "not started"
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)


def _load(path: str) -> tuple[ModelSource, Tokenizer, str]:
    """Open the model and read what the router needs of it. Blocks; raises ModelLoadError."""
    source = open_model(path)
    return source, load_tokenizer(source), source.fingerprint


def _served_model(config: Config, source: ModelSource) -> ServedModel:
    longest = source.config.max_position_embeddings
    wanted = config.model.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"model.max_model_len: {wanted} exceeds the {longest} tokens that {source.name} was made for",
            field="model.max_model_len",
        )
    return ServedModel(
        name=config.model.served_name or source.name,
        vocab_size=source.config.vocab_size,
        max_model_len=longest if wanted is None else wanted,
        eos_token_ids=source.config.eos_token_ids,
    )


def main(config: Config) -> int:
    """Run a router until it is stopped. Returns the exit code."""
    service = RouterService(config)
    configure_logging(config.log, service.router_id)
    return run_service(lambda: service)
