"""Draining workers from outside, and restarting them one by one, while a router serves.

Who starts a worker again that has ended is not known here: `pdserve up`, Kubernetes or another supervisor. It has to
come back under the same `worker_id`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import grpc

from pdserve.client import Client, WorkerState
from pdserve.config import Config
from pdserve.errors import NotFoundError, UnavailableError
from pdserve.rpc.errors import error_of
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.rpc.v1 import worker_pb2, worker_pb2_grpc
from pdserve.security.identity import PeerRole, server_name
from pdserve.security.internal import InternalTls
from pdserve.types import Role
from pdserve.worker_info import WorkerInfo

POLL_S = 0.1
ANSWER_S = 15.0
"""What a worker may take to answer beyond its drain time."""

Progress = Callable[[str], None]


def find_worker(client: Client, worker_id: str) -> WorkerState:
    """The worker of that name, as the router sees it. Raises NotFoundError naming those there are."""
    workers = client.status().workers
    for worker in workers:
        if worker.info.worker_id == worker_id:
            return worker
    known = ", ".join(w.info.worker_id for w in workers) or "none"
    raise NotFoundError(f"no worker {worker_id!r}; the router knows: {known}")


def drain_and_stop(info: WorkerInfo, config: Config, timeout_s: float | None) -> int:
    """Have a worker finish what it has, for `timeout_s` seconds (None: as its own configuration says), and end.

    Returns how many requests it gave back to their routers, which go on with them elsewhere. Raises PdServeError if it
    does not answer or does not let us, and ConfigError for `tls.internal`.
    """
    request = worker_pb2.DrainRequest(timeout_s=timeout_s, stop=True)
    limit_s = None if timeout_s is None else timeout_s + ANSWER_S
    with _channel(info, config) as channel:
        try:
            if info.role is Role.PREFILL:
                answer = worker_pb2_grpc.PrefillWorkerStub(channel).Drain(request, timeout=limit_s)
            else:
                answer = worker_pb2_grpc.DecodeWorkerStub(channel).Drain(request, timeout=limit_s)
        except grpc.RpcError as error:
            raise error_of(error) from error
    return answer.num_remaining


def restart_one_by_one(
    client: Client,
    config: Config,
    worker_ids: Sequence[str],
    *,
    drain_timeout_s: float | None,
    may_be_alone: bool,
    progress: Progress,
) -> None:
    """Drain each worker and wait until a new process has its name and the router may use it, before the next one.

    Stops at the first problem and leaves the others as they are. Raises UnavailableError if there is no other ready
    worker of the kind, unless `may_be_alone`, or if one is not back within `local.start_timeout_s`; and as
    `find_worker` and `drain_and_stop` do.
    """
    for worker_id in worker_ids:
        before = find_worker(client, worker_id).info
        if not may_be_alone:
            _require_another(client, before)
        progress(f"{worker_id}: draining")
        given_back = drain_and_stop(before, config, drain_timeout_s)
        progress(f"{worker_id}: drained, {given_back} requests given back" if given_back else f"{worker_id}: drained")
        _wait_until_back(client, before, config.local.start_timeout_s)
        progress(f"{worker_id}: ready again")


def _require_another(client: Client, info: WorkerInfo) -> None:
    others = (w for w in client.status().workers if w.info.role is info.role and w.info.worker_id != info.worker_id)
    if not any(w.state == "ready" for w in others):
        raise UnavailableError(
            f"{info.worker_id} is the only {info.role} worker that is ready: requests would wait for it, and fail "
            "after router.worker_wait_s; --force restarts it all the same"
        )


def _wait_until_back(client: Client, before: WorkerInfo, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        for worker in client.status().workers:
            same_name = worker.info.worker_id == before.worker_id
            if same_name and worker.info.incarnation != before.incarnation and worker.state == "ready":
                return
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"{before.worker_id} has ended but is not back after {timeout_s:g} s (local.start_timeout_s). Does a "
                "supervisor start it again, with the same worker_id? The workers after it have not been restarted"
            )
        time.sleep(POLL_S)


def _channel(info: WorkerInfo, config: Config) -> grpc.Channel:
    """To a worker, with the certificate of an operator where the configuration has one."""
    tls = InternalTls.of(config, PeerRole.OPERATOR)
    options = list(CHANNEL_OPTIONS)
    if tls is None:
        return grpc.insecure_channel(info.address, options=options)
    name = server_name(config.cluster, info.role.value)
    options.append(("grpc.ssl_target_name_override", name))
    return grpc.secure_channel(info.address, tls.channel_credentials(), options=options)
