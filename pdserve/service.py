"""What every pdserve process does alike: signals, gRPC server, health, exit codes.

A service is started, serves until SIGTERM or SIGINT, drains, and stops. Configuration and start-up errors end the
process with exit code 2 and one line that says what to do; a clean stop with 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import NoReturn, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.addresses import free_port
from pdserve.errors import ConfigError, PdServeError
from pdserve.garbage import settle
from pdserve.rpc.errors import ErrorInterceptor
from pdserve.rpc.options import SERVER_OPTIONS, Options
from pdserve.security.port import PortTls
from pdserve.types import Incarnation

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2

LIVENESS = "liveness"
"""Health service name: SERVING while the process can make progress; depends on no peer and not on redis."""
READINESS = "readiness"
"""Health service name: SERVING while new work is accepted."""


def new_incarnation() -> Incarnation:
    """A name for this start of this process."""
    return Incarnation(secrets.token_hex(8))


class Service(Protocol):
    """A process's main object."""

    async def start(self) -> None:
        """Bring everything up. Raises PdServeError."""

    async def run(self) -> None:
        """Return when the service cannot go on; normally never."""

    async def drain(self) -> None:
        """Refuse new work and let the rest finish, up to the configured time."""

    async def stop(self) -> None:
        """Release everything. Called once, also after a failed start."""


class GrpcEndpoint:
    """A gRPC server with error mapping, health (`""`, liveness, readiness) and reflection, on one address."""

    def __init__(
        self,
        listen: str,
        field: str,
        *,
        options: Options = SERVER_OPTIONS,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: PortTls | None = None,
    ) -> None:
        """`interceptors` come after the one that maps errors, so theirs are mapped as well. `tls`: None for none.

        Raises ConfigError naming `field` if nothing can listen there.
        """
        # Where the port is taken, grpcio writes lines of its own to stderr and says nothing in its error. So a plain
        # socket looks first; whoever takes the port between the two is still noticed below.
        free_port(listen, field)
        self._tls = tls
        guards = () if tls is None else (tls.guard,)
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor(), *guards, *interceptors], options=list(options))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        host, port = listen.rsplit(":", 1)
        self._host = host
        try:
            self.port = (
                self.server.add_insecure_port(listen)
                if tls is None
                else self.server.add_secure_port(listen, tls.credentials)
            )
        except RuntimeError as error:
            raise ConfigError(f"{field}: cannot listen on {listen} (port {port} in use?): {error}") from error

    @property
    def address(self) -> str:
        """host:port with the port that was really taken."""
        return f"{self._host}:{self.port}"

    async def start(self, service_names: Sequence[str]) -> None:
        """Serve. Alive at once, ready when `set_ready` says so."""
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)
        if self._tls is not None:
            self._tls.handshakes.watch(self.port)
        await self.server.start()
        self._names = ("", READINESS, *service_names)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        """Set readiness under every name but liveness."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def set_live(self, live: bool) -> None:
        """Set liveness: false tells an orchestrator to restart the process."""
        status = health_pb2.HealthCheckResponse.SERVING if live else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(LIVENESS, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls and give running ones `grace_s` seconds."""
        await self.server.stop(grace_s)
        if self._tls is not None:
            await self._tls.handshakes.aclose()


async def serve_until_stopped(service: Service, dump: Callable[[str], object] | None = None) -> int:
    """Start, run until a signal or the service's own end, drain, stop. Returns the exit code.

    A second signal cuts the drain short. `dump` writes what the process remembers, and is told why: for SIGUSR2, and
    when the service fails.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if dump is not None:
        loop.add_signal_handler(signal.SIGUSR2, dump, "signal")
    try:
        if not await _finishes_before(service.start(), stopping):
            return EXIT_OK
        settle()
        try:
            failed = await _finishes_before(service.run(), stopping)
        except Exception:
            if dump is not None:
                dump("crash")
            raise
        if failed:
            log.error("stopping: the service has ended by itself")
            return EXIT_FAILURE
        log.info("stopping: draining")
        stopping.clear()
        if not await _finishes_before(service.drain(), stopping):
            log.warning("second signal: not waiting for the rest")
        return EXIT_OK
    finally:
        await service.stop()


async def _finishes_before(work: Coroutine[None, None, None], event: asyncio.Event) -> bool:
    """Run `work` until it returns or `event` is set, in which case it is cancelled. Its exceptions are passed on."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        waiter.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)


def run_service(make: Callable[[], Service], dump: Callable[[str], object] | None = None) -> int:
    """Run a service to its end in a new event loop. Returns the exit code for the process. `dump`: see
    `serve_until_stopped`."""

    async def main() -> int:
        return await serve_until_stopped(make(), dump)

    try:
        return asyncio.run(main())
    except PdServeError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the last word of a process that cannot start
        return EXIT_USAGE


def end_process(code: int) -> NoReturn:
    """End the process of a service that has stopped, without taking the interpreter down.

    Everything has been closed, and the kernel takes the memory back. To take torch and gRPC apart object by object
    costs a second or more in which nothing happens that anybody needs.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
