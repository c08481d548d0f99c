"""What a supervisor starts: a process of pdserve on addresses of its own, or a redis server."""

from __future__ import annotations

import signal
from typing import Protocol

from pdserve.addresses import Reservation, dialable
from pdserve.config import Config
from pdserve.launch.cluster import METRICS_LISTEN, chosen_format, reserve_http
from pdserve.launch.plan import ProcessPlan
from pdserve.launch.process import LineSink, ManagedProcess
from pdserve.ray.health import Probe, service_probe

_ANY_HOST = ("0.0.0.0", "[::]")  # noqa: S104 - compared with, not bound to
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Child(Protocol):
    """A running process."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number if one killed it."""

    def send_signal(self, number: signal.Signals) -> None:
        """Harmless when the process has ended."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end. False if it still runs."""

    def describe_end(self) -> str:
        """How it ended, and why as far as its output says it."""


class ChildMaker(Protocol):
    """Starts the same process again and again."""

    def start(self) -> tuple[Child, Probe]:
        """Start it. Raises PdServeError if that cannot be."""

    def addresses(self) -> dict[str, str]:
        """host:port by what answers there, as far as it is known."""

    def close(self) -> None:
        """Give up what was kept for the next start."""


class ServiceMaker:
    """A router or a worker on one machine. Keeps its ports from one start to the next, so that its addresses stay."""

    def __init__(self, config: Config, role: str, name: str, *, host: str, store_url: str, sink: LineSink) -> None:
        """`host` is how other machines reach this one."""
        self._given = config.model_copy(update={"store": config.store.model_copy(update={"url": store_url})})
        self._role = role
        self._name = name
        self._host = host
        self._sink = sink
        self._reservations: list[Reservation] = []
        self._addresses: dict[str, str] = {}
        self._config: Config | None = None

    def start(self) -> tuple[Child, Probe]:
        """See ChildMaker. Raises ConfigError if an address is taken."""
        if self._config is None:
            try:
                self._config = self._reserve()
            except BaseException:
                self.close()
                raise
        process = ManagedProcess(ProcessPlan(name=self._name, command=self._role, config=self._config), self._sink)
        return process, service_probe(self._config, self._role, self._addresses["grpc"])

    def addresses(self) -> dict[str, str]:
        """`grpc`, and `http` or `metrics`."""
        return dict(self._addresses)

    def close(self) -> None:
        """See ChildMaker."""
        for reservation in self._reservations:
            reservation.close()
        self._reservations.clear()
        self._config = None

    def _reserve(self) -> Config:
        log = self._given.log.model_copy(update={"format": chosen_format(self._given, "json")})
        update = self._router() if self._role == "router" else self._worker()
        return self._given.model_copy(update={"log": log, **update})

    def _router(self) -> dict[str, object]:
        # Where routers listen is never changed: to expose them is a decision.
        given = self._given.router
        listen = self._keep(given.listen, "router.listen")
        self._addresses = {"grpc": self._reachable(listen)}
        http = reserve_http(given, listen)
        if http is not None:
            self._reservations.append(http)
            self._addresses["http"] = self._reachable(http.listen)
        port = None if http is None else http.port
        update = {"listen": listen, "http_port": port, "router_id": self._name}
        return {"router": given.model_copy(update=update)}

    def _worker(self) -> dict[str, object]:
        given = self._given.prefill if self._role == "prefill" else self._given.decode
        listen = self._keep(self._exposed(given.listen), f"{self._role}.listen")
        metrics = self._keep(self._exposed(given.metrics_listen or METRICS_LISTEN), f"{self._role}.metrics_listen")
        self._addresses = {"grpc": self._reachable(listen), "metrics": self._reachable(metrics)}
        update = {
            "worker_id": self._name,
            "listen": listen,
            "metrics_listen": metrics,
            "advertise": given.advertise or self._addresses["grpc"],
        }
        return {self._role: given.model_copy(update=update)}

    def _keep(self, listen: str, field: str) -> str:
        reservation = Reservation(listen, field)
        self._reservations.append(reservation)
        return reservation.listen

    def _exposed(self, listen: str) -> str:
        """Other machines have to reach a worker: on the address of this machine, unless another one is asked for."""
        host, port = listen.rsplit(":", 1)
        return f"{self._host}:{port}" if host in _LOOPBACK else listen

    def _reachable(self, listen: str) -> str:
        host, port = listen.rsplit(":", 1)
        return f"{self._host}:{port}" if host in _ANY_HOST else dialable(listen)
