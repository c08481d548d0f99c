"""Draining a worker from beside it, as the preStop hook of its pod does: it ends when its supervisor says so."""

from __future__ import annotations

import grpc

from pdserve.addresses import dialable
from pdserve.config import Config
from pdserve.launch.rolling import ANSWER_S
from pdserve.rpc.errors import error_of
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.rpc.v1 import worker_pb2, worker_pb2_grpc
from pdserve.security.identity import PeerRole, server_name
from pdserve.security.internal import InternalTls
from pdserve.types import Role


def drain_here(role: Role, config: Config, timeout_s: float | None) -> int:
    """Have the worker of this configuration, on this machine, finish what it has, and go on running.

    Returns how many requests are left after `timeout_s` seconds (None: drain_timeout_s). SIGTERM then gives them back
    to their routers. Raises PdServeError if it does not answer, and ConfigError for `tls.internal`.
    """
    section = config.prefill if role is Role.PREFILL else config.decode
    limit_s = section.drain_timeout_s if timeout_s is None else timeout_s
    tls = InternalTls.of(config, PeerRole.OPERATOR)
    options = list(CHANNEL_OPTIONS)
    address = dialable(section.listen)
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        options.append(("grpc.ssl_target_name_override", server_name(config.cluster, role.value)))
        channel = grpc.secure_channel(address, tls.channel_credentials(), options=options)
    request = worker_pb2.DrainRequest(timeout_s=limit_s, stop=False)
    with channel:
        try:
            if role is Role.PREFILL:
                answer = worker_pb2_grpc.PrefillWorkerStub(channel).Drain(request, timeout=limit_s + ANSWER_S)
            else:
                answer = worker_pb2_grpc.DecodeWorkerStub(channel).Drain(request, timeout=limit_s + ANSWER_S)
        except grpc.RpcError as error:
            raise error_of(error) from error
    return answer.num_remaining
