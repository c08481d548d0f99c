"""A router, its workers and, unless a URL is given, a redis server, as processes of this machine.

Used by `pdserve up`, `pdserve demo` and the process tests. Signals, output and the decision when to stop belong to the
caller; what a process does inside belongs to the process.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.addresses import Reservation, dialable
from pdserve.client import Client, WorkerState
from pdserve.client.access import API_KEY, CA_FILE, SYSTEM, Access
from pdserve.config import Config
from pdserve.config.change import changed_names, settings_read
from pdserve.config.deployment import worker_pools
from pdserve.config.schema import RouterSection
from pdserve.core_ledger import create_ledger
from pdserve.errors import CancelledError, ConfigError, PdServeError, StoreError, WorkerLostError
from pdserve.launch.demo_control import DemoControl
from pdserve.launch.plan import ProcessPlan, lends_cores, plan_processes
from pdserve.launch.process import LineSink, ManagedProcess, StartError
from pdserve.launch.restart import FIRST_DELAY_S, RestartPolicy
from pdserve.launch.rollout import Rollout, require_possible
from pdserve.service import READINESS
from pdserve.store.embedded import EmbeddedRedis
from pdserve.store.private_directory import PrivateDirectory

POLL_S = 0.05
"""How often processes are looked at while starting and stopping."""
STOP_MARGIN_S = 5.0
"""What a process may take to end beyond its drain time."""
ABORT_S = 0.5
"""What a process may take to end that has nothing to finish."""
HURRY_S = 2.0
"""What is left to a process once the caller is in a hurry."""

METRICS_LISTEN = "127.0.0.1:0"
"""Where a worker answers Prometheus if the configuration does not say."""

EMBEDDED = "embedded"


def chosen_format(config: Config, otherwise: str) -> str:
    """`text` or `json`: what the configuration asks for, or `otherwise` where it says `auto`."""
    return otherwise if config.log.format == "auto" else config.log.format


def _ignore(message: str) -> None:
    """Take no notice of progress."""


def _do_nothing() -> None:
    """Meanwhile."""


class LocalCluster:
    """Starts in `start`, or as a context manager; ends in `stop`. Never leaves a process, however it is used.

    >>> with LocalCluster(load_config()) as cluster, Client(cluster.address) as client:
    ...     print(client.generate("Once upon a time").text)

    Processes are children of the thread that starts them, and the kernel kills them when that thread ends: call
    `start` and `supervise` from the main thread.
    """

    def __init__(
        self,
        config: Config,
        *,
        log_format: str = "json",
        sink: LineSink | None = None,
        progress: Callable[[str], None] = _ignore,
        access: Access | None = None,
    ) -> None:
        """`sink` gets every line that the processes write, `progress` what the cluster itself has to tell.

        `access` is how to get into the router, to see when the workers are ready; by default as the environment says.

        `log_format` is used where the configuration says `auto`, because the children write into pipes.
        """
        self.config = config
        self._log_format = chosen_format(config, log_format)
        self._sink = sink
        self._progress = progress
        self._access = access or Access.from_environment()
        self._redis: EmbeddedRedis | None = None
        self._processes: dict[str, ManagedProcess] = {}
        self._plans: dict[str, ProcessPlan] = {}
        """What the next start of each process will be."""
        self._rollout: Rollout | None = None
        self._leaving: dict[ManagedProcess, float] = {}
        """Processes that drain to be replaced, and when they have had enough time for it."""
        self._incarnations: dict[str, str] = {}
        """Of workers that are being replaced: the old ones."""
        self._restarts: dict[str, RestartPolicy] = {}
        self._due: dict[str, float] = {}
        self._demo: DemoControl | None = None
        self._ledger: PrivateDirectory | None = None
        self._killed: set[ManagedProcess] = set()
        """What was killed from the page, until that has been noticed."""
        self._metrics: list[str] = []
        """Addresses for metrics of the workers."""
        self._reservations: list[Reservation] = []
        """Ports of the router, and for metrics of the workers, kept for as long as they may be started again."""
        self.listen = ""
        """host:port on which the router listens; set by `start`."""
        self.http_listen: str | None = None
        """The same for HTTP; None if there is none. Set by `start`."""
        self.redis_url = ""
        """Set by `start`."""

    @property
    def address(self) -> str:
        """host:port that clients connect to."""
        return dialable(self.listen)

    @property
    def http_address(self) -> str | None:
        """host:port that HTTP clients connect to; None if HTTP is off."""
        return None if self.http_listen is None else dialable(self.http_listen)

    @property
    def processes(self) -> Sequence[ManagedProcess]:
        """Router, prefill workers, decode workers; not the redis server."""
        return tuple(self._processes.values())

    @property
    def metrics_addresses(self) -> dict[str, str]:
        """host:port by name of the process, of those that answer GET /metrics on a port that is known."""
        found = {p.name: self.http_listen if p.role == "router" else p.plan.metrics_listen for p in self.processes}
        return {name: dialable(listen) for name, listen in found.items() if listen is not None and listen[-2:] != ":0"}

    @property
    def secured(self) -> bool:
        """Whether the router asks for TLS or a key."""
        return self.config.tls.public is not None or self.config.router.keys_file is not None

    def metrics_scheme(self, name: str) -> str:
        """`http` or `https`: how the process of this name answers at its address of `metrics_addresses`."""
        tls = self.config.tls
        section = tls.public if self._processes[name].role == "router" else tls.internal
        return "http" if section is None else "https"

    def connect(self, *, timeout_s: float | None = None) -> Client:
        """A client of the router."""
        return Client(self.address, timeout_s=timeout_s, tls=self._access.tls, api_key=self._access.api_key)

    def process(self, name: str) -> ManagedProcess:
        """The process with this worker id (or the router's). Raises KeyError."""
        return self._processes[name]

    def kill(self, name: str) -> None:
        """SIGKILL one process and wait for its end."""
        process = self._processes[name]
        process.send_signal(signal.SIGKILL)
        process.wait(STOP_MARGIN_S)

    def _kill_for_demo(self, worker_id: str) -> int:
        """SIGKILL a worker that runs, and say which process that was. Called on another thread; raises KeyError."""
        process = self._processes[worker_id]
        if process.role == "router" or not process.running:
            raise KeyError(worker_id)
        self._killed.add(process)
        process.send_signal(signal.SIGKILL)
        return process.pid

    def start(self, stopping: threading.Event | None = None) -> None:
        """Return when every worker is ready and connected to the router.

        Raises StartError or ConfigError when that cannot be, and CancelledError when `stopping` is set meanwhile.
        Either way nothing is left running.
        """
        try:
            self._start(stopping or threading.Event())
        except BaseException:
            self._abort()
            raise

    def _require_access(self, config: Config) -> None:
        """Raises ConfigError where the router would not let this process in, which could then never tell when it is
        ready."""
        if config.router.keys_file is not None and self._access.api_key is None:
            raise ConfigError(f"{API_KEY}: router.keys_file asks for a key, also of who starts the cluster; set one")
        if (config.tls.public is None) != (self._access.tls is None):
            raise ConfigError(
                f"{CA_FILE}: tls.public is set, so this needs the authority of that certificate (`{SYSTEM}` for the "
                "public ones)"
                if self._access.tls is None
                else f"{CA_FILE}: it is set, but tls.public is not"
            )

    def _start(self, stopping: threading.Event) -> None:
        self._require_access(self.config)
        self._reservations.append(Reservation(self.config.router.listen, "router.listen"))
        self.listen = self._reservations[0].listen
        if (http := reserve_http(self.config.router, self.listen)) is not None:
            self._reservations.append(http)
            self.http_listen = http.listen
        if self.config.store.url == EMBEDDED:
            self._progress("starting an embedded redis server")
            self._redis = EmbeddedRedis()
            try:
                self._redis.start()
            except StoreError as error:
                raise StartError(error.message) from error
            self.redis_url = self._redis.url
        else:
            self.redis_url = self.config.store.url
        num_workers = sum(pool.replicas for pool in worker_pools(self.config))
        metrics = [Reservation(METRICS_LISTEN, "metrics") for _ in range(num_workers)]
        self._reservations += metrics
        if self.config.local.demo_controls:
            self._demo = DemoControl(self._kill_for_demo)
        self._metrics = [reservation.listen for reservation in metrics]
        plans = self._planned(self.config)
        for plan in plans:
            self._plans[plan.name] = plan
            self._processes[plan.name] = ManagedProcess(plan, self._sink)
            self._restarts[plan.name] = RestartPolicy()
        self._progress("starting " + ", ".join(f"{p.name} (pid {p.pid})" for p in self.processes))
        self._wait_ready(stopping)

    def _planned(self, config: Config) -> list[ProcessPlan]:
        """The processes that there are with `config`, at the addresses that have been reserved."""
        return plan_processes(
            config,
            store_url=self.redis_url,
            router_address=self.listen,
            http_port=None if self.http_listen is None else int(self.http_listen.rsplit(":", 1)[1]),
            log_format=chosen_format(config, self._log_format),
            metrics_listen=self._metrics,
            demo_socket=None if self._demo is None else str(self._demo.path),
            core_ledger=self._ledger_path(config),
        )

    def _ledger_path(self, config: Config) -> str | None:
        """The file through which workers lend each other their cores; None if they do not."""
        if not lends_cores(config):
            return None
        if self._ledger is None:
            self._ledger = PrivateDirectory()
            create_ledger(self._ledger.path / "cores", len(self._metrics))
        return str(self._ledger.path / "cores")

    def _wait_ready(self, stopping: threading.Event) -> None:
        timeout_s = self.config.local.start_timeout_s
        deadline = time.monotonic() + timeout_s
        told: set[str] = set()
        with self.connect(timeout_s=1.0) as client:
            while True:
                for process in self.processes:
                    if not process.running:
                        raise StartError(process.describe_end())
                waiting = self._not_ready(client)
                for name in self._processes:
                    if name not in waiting and name not in told:
                        told.add(name)
                        self._progress(f"{name} is ready")
                if not waiting:
                    return
                if time.monotonic() > deadline:
                    raise StartError(
                        f"not ready after {timeout_s:g} s (local.start_timeout_s): still waiting for "
                        + ", ".join(waiting)
                    )
                if stopping.wait(POLL_S):
                    raise CancelledError("stopped while the cluster was starting")

    def _not_ready(self, client: Client) -> list[str]:
        """Names of the processes that are still to come."""
        workers = [p.name for p in self.processes if p.role != "router"]
        routers = [p.name for p in self.processes if p.role == "router"]
        try:
            ready = {w.info.worker_id for w in client.status().workers if w.state == "ready"}
        except PdServeError:
            # The router is not up yet; if it cannot come up, its process ends.
            return routers + workers
        waiting = [name for name in workers if name not in ready]
        return waiting if waiting or self._router_ready() else routers

    def _router_ready(self) -> bool:
        with self._channel() as channel:
            # The published types of this stub leave its methods out.
            health: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(service=READINESS), timeout=1.0)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _channel(self) -> grpc.Channel:
        tls = self._access.tls
        if tls is None:
            return grpc.insecure_channel(self.address)
        named = () if tls.server_name is None else (("grpc.ssl_target_name_override", tls.server_name),)
        return grpc.secure_channel(self.address, tls.credentials(), options=named)

    def supervise(self, stopping: threading.Event, meanwhile: Callable[[], None] = _do_nothing) -> None:
        """Start processes again that have ended, until `stopping` is set: at once after a clean end, with growing
        delays after others. `meanwhile` is called again and again, and may call `apply`.

        The embedded redis server is started again at once, empty: workers register again by themselves. Raises
        WorkerLostError when a process ends too often, and StoreError when redis does not come up again.
        """
        while not stopping.wait(POLL_S):
            meanwhile()
            now = time.monotonic()
            self._revive_redis()
            for name, process in self._processes.items():
                if name in self._due:
                    if now >= self._due[name]:
                        del self._due[name]
                        self._processes[name] = ManagedProcess(self._plans[name], self._sink)
                        self._progress(f"{name} started again (pid {self._processes[name].pid})")
                elif process in self._leaving:
                    if not process.running:
                        del self._leaving[process]
                        self._due[name] = now
                    elif now > self._leaving[process]:
                        process.send_signal(signal.SIGKILL)
                elif process.exit_code == 0:
                    # Told to end, by `pdserve drain` or a signal, which is no failure of its.
                    self._progress(f"{name} has stopped, starting it again")
                    self._due[name] = now
                elif not process.running and process in self._killed:
                    # Somebody wanted to see this, however often.
                    self._killed.remove(process)
                    self._progress(f"{name} was killed from the page\nstarting it again in {FIRST_DELAY_S:g} s")
                    self._due[name] = now + FIRST_DELAY_S
                elif not process.running:
                    if self._rollout is not None and self._rollout.failed(name, process.describe_end()):
                        continue
                    delay = self._restarts[name].ended(now - process.started)
                    if delay is None:
                        raise WorkerLostError(
                            f"giving up after {self._restarts[name].failures} ends: {process.describe_end()}"
                        )
                    self._progress(f"{process.describe_end()}\nstarting {name} again in {delay:g} s")
                    self._due[name] = now + delay
            if self._rollout is not None:
                self._rollout.advance(now)
                if self._rollout.over:
                    self._rollout = None

    def apply(self, config: Config) -> dict[str, list[str]]:
        """Take another configuration while `supervise` runs, which from then on drains the processes that read what has
        changed, and starts them anew, one at a time: prefill workers, decode workers, the router. One that does not get
        ready with its new settings gets its old ones back, and the rest keep theirs.

        Returns the names of the settings that differ, by process. Raises ConfigError for a change that cannot be made
        while the cluster runs, or while another one is being made. Call on the thread of `supervise`.
        """
        if self._rollout is not None:
            raise ConfigError("the last change is still being applied; try again when it is over")
        require_possible(self.config, config)
        self._require_access(config)
        plans = {plan.name: plan for plan in self._planned(config)}
        if plans.keys() != self._plans.keys():
            # The numbers are the same, so only what names a worker can be another.
            gone, come = (
                ", ".join(sorted(names)) for names in (self._plans.keys() - plans, plans.keys() - self._plans)
            )
            raise ConfigError(
                f"worker_id: {gone} would be called {come}, and names cannot change while the cluster runs; leave "
                "worker_id as it was, or stop the cluster and start it again"
            )
        # What runs may be older than `self.config`, after a change that was taken back; and pools have settings of
        # their own.
        for name, plan in plans.items():
            require_possible(self._plans[name].config, plan.config)
        changed = {
            name: names
            for name, plan in plans.items()
            if (names := changed_names(*(settings_read(p.config, p.command) for p in (self._plans[name], plan))))
        }
        # Workers before the router: it is the one whose absence is noticed.
        order = sorted(changed, key=lambda name: plans[name].command == "router")
        self.config = config
        self._rollout = Rollout(
            {name: (self._plans[name], plans[name]) for name in order},
            self,
            timeout_s=config.local.start_timeout_s,
            progress=self._progress,
        )
        return changed

    def replace(self, name: str, plan: ProcessPlan) -> None:
        """Begin to drain a process; what `supervise` starts in its place has `plan`."""
        process = self._processes[name]
        self._plans[name] = plan
        self._incarnations.pop(name, None)
        if (worker := self._seen(name)) is not None:
            self._incarnations[name] = worker.info.incarnation
        if process.running:
            self._leaving[process] = time.monotonic() + process.plan.drain_timeout_s + STOP_MARGIN_S
            process.send_signal(signal.SIGTERM)
        else:
            self._due[name] = time.monotonic()

    def replaced(self, name: str) -> bool:
        """Whether what was started after `replace` is ready."""
        process = self._processes[name]
        if process.plan is not self._plans[name] or not process.running:
            return False
        if process.role == "router":
            return self._router_ready()
        worker = self._seen(name)
        return (
            worker is not None and worker.state == "ready" and worker.info.incarnation != self._incarnations.get(name)
        )

    def _seen(self, name: str) -> WorkerState | None:
        """A worker as the router sees it, if it answers and knows it."""
        try:
            with self.connect(timeout_s=1.0) as client:
                return next((w for w in client.status().workers if w.info.worker_id == name), None)
        except PdServeError:
            return None

    def _revive_redis(self) -> None:
        if self._redis is None:
            return
        try:
            self._redis.pid  # noqa: B018 - raises if it does not run
        except StoreError:
            self._progress("the embedded redis server has ended, starting it again")
            self._redis.stop()
            self._redis.start()

    def _abort(self) -> None:
        """End everything at once: nothing has been served that could be drained."""
        try:
            _stop_group(self.processes, ABORT_S, threading.Event())
            self._processes.clear()
        finally:
            self._release()

    def _release(self) -> None:
        """Give the ports back and end redis."""
        for reservation in self._reservations:
            reservation.close()
        self._reservations.clear()
        if self._demo is not None:
            self._demo.close()
            self._demo = None
        if self._ledger is not None:
            self._ledger.remove()
            self._ledger = None
        self._close_redis()

    def _close_redis(self) -> None:
        if self._redis is not None:
            self._redis.close()
            self._redis = None

    def stop_processes(self, *, hurry: threading.Event | None = None) -> list[str]:
        """Drain and end the router, then prefill workers, then decode workers. Redis goes on.

        Each gets its drain time, or HURRY_S once `hurry` is set, and is then killed. Returns the names of those that
        had to be.
        """
        hurry = hurry or threading.Event()
        killed: list[str] = []
        for role in ("router", "prefill", "decode"):
            group = [p for p in self.processes if p.role == role]
            limit_s = max((p.plan.drain_timeout_s for p in group), default=0.0)
            killed += _stop_group(group, limit_s + STOP_MARGIN_S, hurry)
        self._processes.clear()
        return killed

    def stop(self, *, hurry: threading.Event | None = None) -> list[str]:
        """`stop_processes`, then the embedded redis server. Harmless when repeated."""
        try:
            return self.stop_processes(hurry=hurry)
        finally:
            self._release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self._abort()


def reserve_http(router: RouterSection, taken: str) -> Reservation | None:
    """Where HTTP will listen, which is not `taken`. Raises ConfigError if a port that was asked for is in use."""
    listen = router.http_listen
    if listen is None:
        return None
    any_port = f"{listen.rsplit(':', 1)[0]}:0"
    try:
        found = Reservation(listen, "router.http_port")
    except ConfigError:
        if router.http_port != "auto":
            raise
        return Reservation(any_port, "router.http_port")
    if found.listen == taken:
        found.close()
        if router.http_port != "auto":
            raise ConfigError(
                f"router.http_port: {found.port} is the port of router.listen; choose another",
                field="router.http_port",
            )
        found = Reservation(any_port, "router.http_port")
    return found


def _stop_group(group: Sequence[ManagedProcess], grace_s: float, hurry: threading.Event) -> list[str]:
    """SIGTERM, wait, SIGTERM again once there is a hurry, SIGKILL. Returns the names of those that had to be killed."""
    for process in group:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    hurried = False
    while any(p.running for p in group) and time.monotonic() < deadline:
        if hurry.is_set() and not hurried:
            hurried = True
            deadline = min(deadline, time.monotonic() + HURRY_S)
            for process in group:
                # The second signal makes a service leave its drain.
                process.send_signal(signal.SIGTERM)
        time.sleep(POLL_S)
    killed = [p.name for p in group if p.running]
    for process in group:
        process.send_signal(signal.SIGKILL)
        process.wait(STOP_MARGIN_S)
    return killed
