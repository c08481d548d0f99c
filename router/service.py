"""The router process: brings the parts up in order, keeps their tasks, and takes them down in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from typing import Final

from pdserve.config.schema import Config
from pdserve.errors import ConfigError, StoreError
from pdserve.logs import configure_logging
from pdserve.metrics import Exposition
from pdserve.model.endless import with_window
from pdserve.model.source import ModelSource, open_model
from pdserve.rpc.call_counting import CallCountingInterceptor
from pdserve.rpc.options import public_server_options
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.security.identity import PeerRole
from pdserve.security.internal import Channels, InternalTls
from pdserve.security.port import PortTls
from pdserve.security.public import PublicTls
from pdserve.security.refusals import CLIENT_REASONS, Refusals
from pdserve.service import GrpcEndpoint, run_service
from pdserve.store.client import Store, require_shared
from pdserve.store.journal import RequestJournal
from pdserve.store.login import StoreLogin
from pdserve.store.prefix_reader import PrefixReader
from pdserve.store.registry import WorkerDirectory
from pdserve.store.requests import RequestRecords
from pdserve.store.router_lease import RouterLease
from pdserve.telemetry.dump import FlightDump
from pdserve.telemetry.tracing import open_tracing
from pdserve.tokenizer import Tokenizer, load_tokenizer
from router.admission import Admission, AdmissionLimits, WorkersPredictor
from router.api import ClusterServicer, InferenceServicer
from router.authentication import Doorkeeper, KeyInterceptor
from router.call_limits import CallLimitInterceptor
from router.core import RouterCore, ServedModel
from router.flight import trace_of
from router.grammar import Grammars
from router.history import History
from router.http.app import make_app
from router.http.server import HttpEndpoint
from router.index import IndexFeed, PrefixIndex, PrefixLocations
from router.limits import CallLimiter
from router.metrics import RouterMetrics, RouterState, StateReader
from router.page.feed import Feed
from router.page.snapshot import RouterView
from router.placement import LocalLimits
from router.prompts import Prompts
from router.request_services import RequestServices
from router.requests import RequestTable
from router.retry_budget import RetryBudget
from router.sessions import open_session
from router.worker_pool import ModelIdentity, WorkerPool

log = logging.getLogger(__name__)

SERVICE_NAMES: Final = ("pdserve.rpc.v1.Inference", "pdserve.rpc.v1.Cluster")

MAX_BLOCK_S: Final = 0.5
"""Longest that one reading of what workers announce waits for news."""

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
        self._lease: RouterLease | None = None
        self._history: History | None = None
        self._page: Feed | None = None
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

    @property
    def flight_dump(self) -> FlightDump:
        """Writes what this router remembers of the latest outputs."""
        history = self._history
        return FlightDump(
            lambda: self.router_id,
            lambda: trace_of(() if history is None else history, self.router_id),
            self._config.flight.directory,
        )

    async def start(self) -> None:
        """Listen. Ready, as health says it, only when a pair of workers is.

        Raises ModelLoadError, StoreError or ConfigError.
        """
        config = self._config
        started_at = time.monotonic()
        require_shared(config.store.url)
        # The port early: a taken one is a mistake that is cheap to find.
        internal = InternalTls.of(config, PeerRole.ROUTER)
        public = None if config.tls.public is None else PublicTls(config.tls.public)
        refusals = {
            "grpc": Refusals("router.listen", CLIENT_REASONS),
            "http": Refusals("router.http_port", CLIENT_REASONS),
        }
        keys_file = config.router.keys_file
        keepers = None if keys_file is None else {api: Doorkeeper(keys_file, refusals[api]) for api in refusals}
        limiter = CallLimiter(config.router.max_requests_per_key)
        if keepers is not None:
            keeper = keepers["grpc"]
            limiter = CallLimiter(
                config.router.max_requests_per_key, keeper.max_requests, keeper.name_of, keeper.is_operator
            )
        counting = CallCountingInterceptor("Inference/Generate")
        endpoint = self._endpoint = GrpcEndpoint(
            config.router.listen,
            "router.listen",
            options=public_server_options(
                max_message_bytes=config.router.grpc_max_message_bytes,
                max_connections=config.router.grpc_max_connections,
                max_streams_per_connection=config.router.grpc_max_streams_per_connection,
                min_ping_interval_s=config.router.grpc_min_ping_interval_s,
            ),
            interceptors=[
                counting,
                *(() if keepers is None else (KeyInterceptor(keepers["grpc"]),)),
                CallLimitInterceptor(limiter),
            ],
            tls=None if public is None else PortTls.public(public, refusals["grpc"]),
        )
        self._undo.push_async_callback(endpoint.stop, 0.0)
        if config.router.http_listen is not None:
            self._http = HttpEndpoint(config.router, public, refusals["http"])
            self._undo.push_async_callback(self._http.stop, 0.0)
        store = await Store.connect(
            config.store.url, config.cluster, timeout_s=config.store.timeout_s, login=StoreLogin.of(config.store)
        )
        self._undo.push_async_callback(store.aclose)
        source, tokenizer, fingerprint = await asyncio.to_thread(_load, config.model.path)
        model = _served_model(config, source)

        records = RequestRecords(
            store, retention_s=config.store.record_ttl_s, resume_retention_s=config.router.retain_s
        )
        # Whoever freezes is given up by workers and by other routers at the same time.
        lease = self._lease = RouterLease(
            store, self.router_id, secrets.token_hex(8), lease_s=config.health.peer_timeout_s
        )
        await lease.acquire()
        journal = self._journal = RequestJournal(records, owner=self.router_id)
        prompts = Prompts(tokenizer, tool_format=config.router.tool_format)
        self._undo.callback(prompts.close)
        pool = self._pool = WorkerPool(
            router_id=self.router_id,
            model=ModelIdentity(model.name, fingerprint),
            health=config.health,
            local=LocalLimits(
                max_tokens_ahead=config.router.local_prefill.max_tokens_ahead,
                stream_weight=config.router.local_prefill.stream_weight,
            ),
            open_session=functools.partial(open_session, channels=Channels(internal)),
        )
        self._undo.push_async_callback(pool.aclose)
        index = PrefixIndex()
        feed = IndexFeed(PrefixReader(store), index, block_s=min(MAX_BLOCK_S, config.store.timeout_s / 2))
        prefixes = PrefixLocations(fingerprint, index, live=lambda: feed.live)
        waits = config.router.admission
        admission = Admission(
            WorkersPredictor(pool),
            AdmissionLimits(
                max_waiting=waits.max_waiting,
                max_ttft_s=waits.max_ttft_s,
                ahead_s=waits.ahead_s,
                worker_wait_s=config.router.worker_wait_s,
            ),
        )
        metrics = RouterMetrics(model.name, vllm_names=config.router.vllm_metrics)
        tracing = open_tracing(config.tracing, service="pdserve-router", instance=self.router_id)
        if tracing is not None:
            self._undo.push_async_callback(asyncio.to_thread, tracing.sink.close)
        history = self._history = History(config.flight.requests, model.name, tracing)
        retry_budget = RetryBudget(config.router.retry_budget, time.monotonic())
        services = RequestServices(
            router_id=self.router_id,
            model=model.name,
            vocab_size=model.vocab_size,
            config=config.router,
            pool=pool,
            journal=journal,
            tokenizer=tokenizer,
            prefixes=prefixes,
            admission=admission,
            metrics=metrics,
            history=history,
            retry_budget=retry_budget,
            tracing=tracing,
        )
        directory = WorkerDirectory(store)
        grammars = Grammars(tokenizer, model.vocab_size)
        self._undo.callback(grammars.close)
        core = RouterCore(
            model=model,
            prompts=prompts,
            services=services,
            records=records,
            lease=lease,
            grammars=grammars,
            limiter=limiter,
        )
        table = self._table = core.table

        def store_available() -> bool:
            return directory.available and not journal.degraded

        inference = InferenceServicer(core, heartbeat_s=config.health.heartbeat_s)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, endpoint.server)
        inference_pb2_grpc.add_ClusterServicer_to_server(
            ClusterServicer(
                router_id=self.router_id,
                table=table,
                pool=pool,
                admission=admission,
                prefixes=prefixes,
                store_available=store_available,
            ),
            endpoint.server,
        )
        names = [*SERVICE_NAMES, *self._add_vllm_engine(core, endpoint)]
        await endpoint.start(names)
        self._undo.push_async_callback(endpoint.stop, ABORT_S)
        if self._http is not None:
            state = RouterState(
                router_id=self.router_id,
                pool=pool,
                table=table,
                admission=admission,
                limiter=limiter,
                retry_budget=retry_budget,
                index=index,
                refusals=refusals,
                grpc_calls=counting.counts,
                store_available=store_available,
            )
            exposition = Exposition(metrics.values, StateReader(metrics, state))
            page = self._page = Feed(
                RouterView(
                    router_id=self.router_id, pool=pool, table=table, metrics=metrics, store_available=store_available
                )
            )
            doorkeeper = None if keepers is None else keepers["http"]
            await self._http.start(make_app(core, limiter, exposition, page, doorkeeper))
            self._undo.push_async_callback(self._http.stop, ABORT_S)
        self._undo.callback(table.close)
        self._supervisor = asyncio.create_task(
            self._supervise(directory, pool, table, journal, lease, endpoint, feed, prefixes), name="router"
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
        """Refuse new requests, let the others finish, leave to other routers or end what takes too long, write the last
        records."""
        assert self._endpoint is not None and self._table is not None and self._journal is not None, "not started"
        assert self._lease is not None, "not started"
        await self._endpoint.set_ready(False)
        await self._table.drain(self._config.router.drain_timeout_s)
        try:
            await self._lease.withdraw()
        except StoreError as error:
            log.warning("the lease of this router ends by itself: %s", error)
        num_left = self._table.leave_to_others()
        num_ended = self._table.close()
        num_unwritten = await self._journal.flush(FLUSH_S)
        log.info(
            "drained",
            extra={
                "requests_left_to_others": num_left,
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
        lease: RouterLease,
        endpoint: GrpcEndpoint,
        feed: IndexFeed,
        prefixes: PrefixLocations,
    ) -> None:
        def follow_workers() -> None:
            infos = {worker.key: worker.info for worker in pool.workers}
            feed.follow({key: info.num_blocks for key, info in infos.items()})
            prefixes.follow({key: info.kv_layout.block_size for key, info in infos.items()})

        pool.watch(follow_workers)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(journal.run())
            tasks.create_task(lease.keep(journal.verify))
            tasks.create_task(self._follow_registry(directory, pool))
            tasks.create_task(self._show_readiness(pool, table, endpoint))
            tasks.create_task(feed.run())
            tasks.create_task(pool.wait_for_failure())
            if self._http is not None:
                tasks.create_task(self._http.run())
            if self._page is not None:
                tasks.create_task(self._page.run())

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
                log.info("ready" if ready else f"not ready: {pool.missing}")
                shown = ready

    def _add_vllm_engine(self, core: RouterCore, endpoint: GrpcEndpoint) -> tuple[str, ...]:
        """The services added, by name. Raises ConfigError if the stubs are not installed."""
        if not self._config.router.vllm_grpc:
            return ()
        try:
            from router.vllm_engine import SERVICE_NAME, VllmEngine
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"router.vllm_grpc: needs {error.name}; pip install 'pdserve[vllm-grpc]'", field="router.vllm_grpc"
            ) from error
        endpoint.server.add_generic_rpc_handlers((VllmEngine(core, self._config.model.path).handler(),))
        return (SERVICE_NAME,)

    async def _stop_supervisor(self) -> None:
        assert self._supervisor is not None, "not started"
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)


def _load(path: str) -> tuple[ModelSource, Tokenizer, str]:
    """Open the model and read what the router needs of it. Blocks; raises ModelLoadError."""
    source = open_model(path)
    return source, load_tokenizer(source), source.fingerprint


def _served_model(config: Config, source: ModelSource) -> ServedModel:
    engine = config.engine
    source = with_window(source, engine.attention_window, engine.attention_sinks, config.model.max_model_len)
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
    return run_service(lambda: service, lambda reason: service.flight_dump(reason))
