"""Workers that are registered: reachable from here, with the same model, and able to hand KV to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby, product
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.config import Config
from pdserve.doctor.findings import Finding, ok, problem, warning
from pdserve.errors import ModelLoadError
from pdserve.model.source import open_model
from pdserve.security.internal import Channels, InternalTls
from pdserve.service import LIVENESS
from pdserve.types import Role
from pdserve.worker_info import WorkerInfo

ANSWER_S: Final = 3.0
"""What a worker may take to say that it is alive."""


async def check_peers(config: Config, workers: Sequence[WorkerInfo], tls: InternalTls | None) -> list[Finding]:
    """`tls`: the certificate to show; None for none."""
    if not workers:
        return []
    channels = Channels(tls)
    reached = await asyncio.gather(*(_reach(channels, worker) for worker in workers))
    findings = [finding for finding in reached if finding is not None]
    findings = findings or [ok("peers", f"all {len(workers)} workers can be reached")]
    findings += check_model(config, workers)
    return findings + check_pairs(workers)


def check_model(config: Config, workers: Sequence[WorkerInfo]) -> list[Finding]:
    """Whether the workers have the model of this configuration, byte for byte."""
    try:
        ours = open_model(config.model.path).fingerprint
    except ModelLoadError as error:
        return [problem("model", error.message, "correct model.path, or put the model there")]
    others = [worker for worker in workers if worker.model_fingerprint != ours]
    if not others:
        return [ok("model", f"{config.model.path}: all {len(workers)} workers have it")]
    by_print = groupby(sorted(others, key=lambda w: w.model_fingerprint), key=lambda w: w.model_fingerprint)
    return [
        problem(
            "model",
            f"{', '.join(w.worker_id for w in group)}: model fingerprint {fingerprint[:12]}, and "
            f"{config.model.path} here has {ours[:12]}: routers do not use these workers",
            "put the same files on every machine (compare with `sha256sum`), or give deployments of different models a "
            "`cluster` of their own",
        )
        for fingerprint, group in by_print
    ]


def check_pairs(workers: Sequence[WorkerInfo]) -> list[Finding]:
    """Whether every prefill worker can hand KV to every decode worker, and without rounding it on the way."""
    sources = [worker for worker in workers if worker.role is Role.PREFILL]
    targets = [worker for worker in workers if worker.role is Role.DECODE]
    findings = []
    for source, target in product(sources, targets):
        here, there = source.kv_layout.dtype, target.kv_layout.dtype
        if reasons := source.incompatibilities(target):
            findings.append(
                problem(
                    "hand-off",
                    f"{source.worker_id} cannot hand KV to {target.worker_id}: {'; '.join(reasons)}",
                    "give both the same model, engine, kv and transfer settings",
                )
            )
        elif here != there:
            findings.append(
                warning(
                    "hand-off",
                    f"{source.worker_id} has KV in {here} and {target.worker_id} in {there}: it is converted, and not "
                    "found again in the prefix cache of the decode worker",
                    "give both the same kv.dtype, unless capacity is worth more than the cache",
                )
            )
    return findings


async def _reach(channels: Channels, worker: WorkerInfo) -> Finding | None:
    async with channels.open(worker.address, worker.role.value) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(service=LIVENESS), timeout=ANSWER_S, wait_for_ready=True
            )
        except grpc.RpcError as error:
            return problem(
                "peers",
                f"{worker.worker_id} at {worker.address} does not answer: {error.code().name}",
                f"can this machine resolve and reach the address? It is {worker.role}.advertise of that worker; look "
                "for firewalls and network policies, and for certificates where TLS is used",
            )
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return problem(
        "peers",
        f"{worker.worker_id} at {worker.address} says that it is not alive: a step of its engine hangs",
        "look at its log; an orchestrator restarts it",
    )
