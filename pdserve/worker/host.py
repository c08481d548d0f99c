"""What surrounds a worker's scheduler: start-up order, identity, registration, health, and the way out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import secrets
import signal
import time
from collections.abc import Callable

import grpc

import pdserve
from pdserve.config import Config
from pdserve.config.schema import WorkerSection
from pdserve.engine.engine import Engine, EngineLostError
from pdserve.errors import ConfigError, StoreError
from pdserve.metrics.listener import MetricsListener
from pdserve.rpc.call_counting import CallCountingInterceptor
from pdserve.security.identity import PeerRole
from pdserve.security.internal import PLAINTEXT, Channels, InternalTls
from pdserve.security.local_guard import LocalGuard
from pdserve.security.port import PortTls
from pdserve.security.refusals import WORKER_CALL_REASONS, WORKER_REASONS, Refusals
from pdserve.service import GrpcEndpoint, new_incarnation
from pdserve.store.client import Store, require_shared
from pdserve.store.login import StoreLogin
from pdserve.store.prefix_writer import PrefixWriter
from pdserve.store.registry import WorkerRegistration
from pdserve.telemetry.dump import FlightDump
from pdserve.telemetry.tracing import open_tracing
from pdserve.types import Role, WorkerStats
from pdserve.worker.engine_thread import EngineThread, StepResult, StepRunner
from pdserve.worker.late_services import LateServices
from pdserve.worker.metrics import WorkerMetrics, WorkerState
from pdserve.worker.model import EngineFactory, EngineGroup, LoadedModel, load_model, max_model_len
from pdserve.worker.prefix_announcer import PrefixAnnouncer
from pdserve.worker.recorder import JobRecorder
from pdserve.worker.tasks import TaskScope
from pdserve.worker_info import WorkerInfo

log = logging.getLogger(__name__)

ENGINE_JOIN_S = 10.0
"""How long a stopping worker waits for the step in progress."""
LOST_ENGINE_JOIN_S = 1.0
"""The same for an engine that has lost one of its processes: it may wait for that until its time-out."""

_WILDCARD_HOSTS = ("0.0.0.0", "[::]", "::")  # noqa: S104 - recognised in order to refuse announcing them


class WorkerHost:
    """Everything of a worker process but its scheduler and its hand-offs.

    Call `open`, register the servicers on `server`, then `announce`; `aclose` once, also if `open` failed.
    """

    def __init__(
        self,
        role: Role,
        config: Config,
        section: WorkerSection,
        *,
        engine_factory: EngineFactory | None,
    ) -> None:
        """`section` is the role's own part of `config`. `engine_factory` replaces loading the configured model."""
        self.config = config
        self.role = role
        self.worker_id = section.worker_id or f"{role}-{secrets.token_hex(4)}"
        self.incarnation = new_incarnation()
        self.tasks = TaskScope()
        self.endpoint: GrpcEndpoint
        self.server: grpc.aio.Server
        """Where to add servicers, after `open` as well."""
        self.info: WorkerInfo
        self.runner: StepRunner
        self.draft_engine: Engine | None = None
        """Of a model that drafts for the other one, from `open` on, if there is one."""
        self.engine_left_behind = False
        """Whether the engine's thread was still busy when the worker had to stop."""
        self.metrics = WorkerMetrics()
        self._tracing = open_tracing(config.tracing, service=f"pdserve-{role.value}", instance=self.worker_id)
        self.recorder = JobRecorder(
            self.worker_id,
            max_steps=config.flight.steps,
            sink=None if self._tracing is None else self._tracing.sink,
        )
        self.flight_dump = FlightDump(lambda: self.worker_id, self.recorder.chrome_trace, config.flight.directory)
        """Writes what the recorder remembers."""
        self.channels = PLAINTEXT
        """How to connect to other workers; as the configuration says after `open`."""
        self._tls: InternalTls | None = None
        self._refusals = {
            "grpc": Refusals(f"{role}.listen", WORKER_CALL_REASONS),
            "metrics": Refusals(f"{role}.metrics_listen", WORKER_REASONS),
        }
        """Who was not let in, by port."""
        self._calls = CallCountingInterceptor(f"{self.role.value.capitalize()}Worker/Session")
        self._metrics_listener: MetricsListener | None = None
        self._section = section
        self._engine_factory = engine_factory or load_model
        self._opened: GrpcEndpoint | None = None
        self._thread: EngineThread | None = None
        self._ranks: EngineGroup | None = None
        self._engine_is_lost = False
        self._store: Store | None = None
        self._registration: WorkerRegistration | None = None
        self._stats_changed = asyncio.Event()
        self._replaced = asyncio.Event()
        self.prefixes = PrefixAnnouncer(self.incarnation)
        """Tells routers what is in the prefix cache; `use` it between `open` and `announce`."""
        self._prefix_writer: PrefixWriter | None = None

    async def open(self, service_names: list[str]) -> None:
        """Take the port, reach redis, load the model; cheap checks first. Raises PdServeError.

        From the start the process is alive to health probes, and ready only after `announce`.
        """
        config = self.config
        require_shared(config.store.url)
        tls = self._tls = InternalTls.of(config, PeerRole.of(self.role))
        self.channels = Channels(tls)
        self._warn_of_left_out_transports()
        # With certificates, the guard of `PortTls` knows who may drain.
        drains_for_all = tls is not None or self._section.remote_drain
        guards = () if drains_for_all else (LocalGuard(self._refusals["grpc"], f"{self.role}.remote_drain"),)
        self.endpoint = self._opened = GrpcEndpoint(
            self._section.listen,
            f"{self.role}.listen",
            interceptors=(self._calls, *guards),
            tls=None if tls is None else PortTls.internal(tls, self._refusals["grpc"]),
        )
        address = self._advertised()
        late = LateServices()
        self.endpoint.server.add_generic_rpc_handlers((late,))
        self.server = late.as_server()
        await self.endpoint.start(service_names)
        self._store = await Store.connect(
            config.store.url, config.cluster, timeout_s=config.store.timeout_s, login=StoreLogin.of(config.store)
        )
        self._thread = EngineThread(f"{self.worker_id}-engine")
        begin = time.monotonic()
        loaded = await self._thread.call(lambda: self._engine_factory(config))
        # Before anything else may fail: `aclose` ends them.
        self._ranks = loaded.group
        self.info = self._describe(loaded, address)
        self.runner = StepRunner(loaded.engine, self._thread, on_step=self._on_step)
        self.draft_engine = loaded.draft
        if loaded.group is not None:
            self.tasks.spawn(self._watch_ranks(loaded.group), "ranks")
        self.metrics.engine_loaded(1 if loaded.group is None else loaded.group.size)
        log.info(
            "model loaded",
            extra={
                "model": self.info.model,
                "blocks": self.info.num_blocks,
                "block_size": self.info.kv_layout.block_size,
                "ranks": 1 if loaded.group is None else loaded.group.size,
                "seconds": round(time.monotonic() - begin, 3),
            },
        )

    def _on_step(self, result: StepResult) -> None:
        self.metrics.step_done(result)
        self.recorder.step_done(result)

    @property
    def listen_host(self) -> str:
        """Address of this machine that the worker listens on."""
        return self._section.listen.rsplit(":", 1)[0]

    @property
    def listening(self) -> bool:
        """Whether the port is open; health probes are answered from then on."""
        return self._opened is not None

    @property
    def metrics_address(self) -> str | None:
        """host:port where metrics are, once `serve_metrics` has returned; None if the configuration wants none."""
        return None if self._metrics_listener is None else self._metrics_listener.address

    async def serve_metrics(self, state: WorkerState) -> None:
        """Answer Prometheus, where the configuration says so. Between `open` and `announce`. Raises ConfigError."""
        assert self._thread is not None, "metrics before open"
        listen = self._section.metrics_listen
        if listen is None:
            return
        state = dataclasses.replace(state, refusals={**self._refusals, **state.refusals}, grpc_calls=self._calls.counts)
        exposition = self.metrics.exposition(self.info, self.runner, self._thread, state, time.monotonic)
        self._metrics_listener = MetricsListener(
            exposition,
            listen,
            f"{self.role}.metrics_listen",
            make_gate=None if self._tls is None else functools.partial(self._tls.gate, self._refusals["metrics"]),
        )
        await self._metrics_listener.start()

    async def announce(self, get_stats: Callable[[], WorkerStats]) -> None:
        """Let others find this worker. Raises StoreError."""
        assert self._store is not None and self._thread is not None, "announce before open"
        registration = WorkerRegistration(self._store, self.info, lease_s=self.config.store.lease_ttl_s)
        await registration.register(get_stats())
        self._registration = registration
        self.tasks.spawn(self._keep_registered(registration, get_stats), "registration")
        lease_s = self.config.store.lease_ttl_s
        self._prefix_writer = PrefixWriter(
            self._store, worker_id=self.worker_id, incarnation=self.incarnation, lease_s=lease_s
        )
        self.tasks.spawn(self.prefixes.run(self._prefix_writer, lease_s=lease_s), "prefix-announcer")
        self.tasks.spawn(self._watch(self._thread), "watchdog")
        await self.endpoint.set_ready(True)
        log.info(
            "ready",
            extra={"worker": self.worker_id, "address": self.info.address, "metrics": self.metrics_address},
        )

    async def begin_drain(self) -> None:
        """Tell health probes and, through redis, everybody else that no new work is taken."""
        await self.endpoint.set_ready(False)
        self._stats_changed.set()

    def stop_process(self) -> None:
        """End as if by SIGTERM: what is to be waited for has been."""
        log.info("asked to stop after the drain")
        signal.raise_signal(signal.SIGTERM)

    async def ended(self) -> bool:
        """Wait until the worker cannot go on. True if it may finish its work because only its name has been taken over
        by a newer process; false, after logging the cause, if it has failed."""
        failed = asyncio.ensure_future(self.tasks.failed())
        replaced = asyncio.ensure_future(self._replaced.wait())
        try:
            await asyncio.wait((failed, replaced), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                log.critical("the worker cannot go on", exc_info=failed.result())
                self.flight_dump("crash")
                return False
            return True
        finally:
            failed.cancel()
            replaced.cancel()

    async def join_engine(self) -> None:
        """Wait for the step in progress, so that nothing computes into the pool any more. Loading is not waited for."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        loaded = self._registration is not None or self._replaced.is_set()
        timeout_s = LOST_ENGINE_JOIN_S if self._engine_is_lost else ENGINE_JOIN_S if loaded else 0.0
        if await thread.join(timeout_s):
            return
        self.engine_left_behind = True
        if loaded:
            log.error("the engine is still computing after %g s; leaving it behind", timeout_s)

    async def aclose(self) -> None:
        """Leave the registry, close the port. Joins the engine unless that has been done."""
        await self.join_engine()
        await self.tasks.aclose()
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.close)
        try:
            if self._registration is not None:
                await self._registration.deregister()
            if self._prefix_writer is not None:
                await self._prefix_writer.withdraw()
        except StoreError as error:
            log.warning("cannot deregister; the lease will end by itself: %s", error)
        if self._metrics_listener is not None:
            await self._metrics_listener.aclose()
        if self._opened is not None:
            await self._opened.stop(1.0)
        if self._store is not None:
            await self._store.aclose()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.sink.close)

    def _warn_of_left_out_transports(self) -> None:
        config = self.config
        if left_out := [name for name in config.transfer.transports if name not in config.transports]:
            log.warning(
                "transfer.transports: without %s, which would not be encrypted (tls.internal is set); KV goes over %s",
                *(", ".join(left_out), " and ".join(config.transports)),
            )

    def _advertised(self) -> str:
        """host:port for others. Raises ConfigError if there is none."""
        advertise = self._section.advertise
        if advertise is None:
            advertise = self.endpoint.address
            if advertise.rsplit(":", 1)[0] in _WILDCARD_HOSTS:
                raise ConfigError(
                    f"{self.role}.advertise: needed when listening on all addresses ({self._section.listen}); "
                    "give the host:port that other machines reach",
                    field=f"{self.role}.advertise",
                )
        host, port = advertise.rsplit(":", 1)
        return f"{host}:{self.endpoint.port}" if port == "0" else advertise

    def _describe(self, loaded: LoadedModel, address: str) -> WorkerInfo:
        config = self.config
        return WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            address=address,
            model=config.model.served_name or loaded.name,
            model_fingerprint=loaded.fingerprint,
            kv_layout=loaded.engine.layout,
            num_blocks=loaded.engine.num_blocks,
            max_model_len=max_model_len(config, loaded.engine),
            transports=config.transports,
            codecs=(config.transfer.codec,) if self.role is Role.PREFILL else config.transfer.accept_codecs,
            prefill_chunk_tokens=config.decode.local_prefill_tokens_per_step if self.role is Role.DECODE else 0,
            prefill_pause_s=config.decode.local_prefill_pause_s if self.role is Role.DECODE else 0.0,
            version=pdserve.__version__,
        )

    async def _keep_registered(self, registration: WorkerRegistration, get_stats: Callable[[], WorkerStats]) -> None:
        await registration.keep(get_stats, self._stats_changed)
        # The entry now belongs to the newer process.
        self._registration = None
        self._replaced.set()

    async def _watch_ranks(self, ranks: EngineGroup) -> None:
        """Raise EngineLostError when one of the engine's processes has ended."""
        loop = asyncio.get_running_loop()
        reason = ""
        is_lost = asyncio.Event()

        def lost(text: str) -> None:
            nonlocal reason
            reason = text
            # The loop may have ended; then nobody waits for this.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(is_lost.set)

        ranks.on_lost(lost)
        await is_lost.wait()
        self._engine_is_lost = True
        raise EngineLostError(f"{reason}; the others have been ended, and so does this worker")

    async def _watch(self, thread: EngineThread) -> None:
        """Fail the liveness probe while a step hangs. A worker that is merely busy, or without redis, stays alive."""
        live, limit_s = True, self.config.health.step_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            stuck = thread.busy_s(time.monotonic()) > limit_s
            if stuck == live:
                live = not stuck
                if stuck:
                    log.error("engine step has not returned for %g s (health.step_timeout_s)", limit_s)
                else:
                    log.info("engine step has returned after all")
                await self.endpoint.set_live(live)
