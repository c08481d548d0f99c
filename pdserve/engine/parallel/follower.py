"""The process of a follower: `python -m pdserve.engine.parallel.follower CONTROL STORE [MEMORY]`.

The arguments are descriptors that it has inherited: two sockets to rank 0, for steps and for KV, and the memory of its
KV pool unless that is on a GPU. It is started by `group.py` alone, and ends with rank 0.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from pdserve.config.schema import LogSection
from pdserve.engine.parallel.collectives import CollectiveError, join_group
from pdserve.engine.parallel.follow import follow
from pdserve.engine.parallel.messages import Channel, ChannelClosedError, Kind, ProtocolError, from_json, to_json
from pdserve.engine.parallel.part_model import PartModel, PartSettings
from pdserve.engine.parallel.remote_store import serve_store
from pdserve.engine.shared_pool import PoolMemory
from pdserve.errors import ModelLoadError, PdServeError
from pdserve.launch.parent import end_with_launcher
from pdserve.logs import configure_logging
from pdserve.model.source import open_model
from pdserve.shared_memory import SharedMemory

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILURE = 0, 1


def main(arguments: list[str]) -> int:
    """Follow rank 0 until it ends. Returns the exit code."""
    end_with_launcher()
    # Rank 0 is told to stop, and finishes what it does before it lets go of the others. A terminal and systemd send
    # these signals to all processes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    fds = [int(argument) for argument in arguments]
    channel, store_channel = (Channel(socket.socket(fileno=fd)) for fd in fds[:2])
    memory = None
    if len(fds) > 2:
        shared = SharedMemory.attach(fds[2], writable=True)
        memory = PoolMemory(data=np.asarray(shared), shared=(shared,))
    try:
        _run(channel, store_channel, memory)
    except ChannelClosedError:
        # Rank 0 has gone while it was not expected to; there is nothing to be said to it.
        return EXIT_OK
    except CollectiveError as error:
        log.error("the other ranks cannot be reached: %s", error)
        return EXIT_FAILURE
    except Exception:
        log.exception("rank cannot go on")
        return EXIT_FAILURE
    return EXIT_OK


def _run(channel: Channel, store_channel: Channel, memory: PoolMemory | None) -> None:
    start = _expect(channel, Kind.START)
    configure_logging(LogSection(**start["log"]), start["process"])
    settings = PartSettings.from_json(start["part"])
    try:
        model = _load(start["model"], start["fingerprint"], settings, memory)
    except PdServeError as error:
        report = {"code": error.code, "message": error.message, "field": error.field}
        channel.send(Kind.FAILED, [from_json(report)])
        # An end before rank 0 has read that would be taken for a crash.
        channel.receive()
        return
    channel.send(Kind.READY)
    join = _expect(channel, Kind.JOIN)
    store = FileStore(join["rendezvous"], settings.size)
    collectives = join_group(store, settings.rank, settings.size, model.device, settings.timeout_s)
    # Rank 0 removes the file when this has come through.
    collectives.sum(torch.zeros(1, device=model.device))
    if model.staging is not None:
        thread = threading.Thread(target=_serve, args=(store_channel, model), name="kv", daemon=True)
        thread.start()
    follow(channel, model.join(collectives), model.staging)


def _load(path: str, fingerprint: str, settings: PartSettings, memory: PoolMemory | None) -> PartModel:
    source = open_model(path)
    if source.fingerprint != fingerprint:
        raise ModelLoadError(f"{path}: has been replaced while the worker started; start it again", file=path)
    return PartModel(source, settings, memory)


def _serve(channel: Channel, model: PartModel) -> None:
    try:
        torch.cuda.set_device(model.device)
        serve_store(channel, model.store())
    except Exception:
        # Rank 0 waits for an answer, and sees the end of the process.
        log.exception("rank cannot give its KV any more")
        _end(EXIT_FAILURE)


def _expect(channel: Channel, wanted: Kind) -> dict[str, Any]:
    kind, arrays = channel.receive()
    if kind is not wanted:
        raise ProtocolError(f"{kind.name} instead of {wanted.name}")
    return to_json(arrays[0])


def _end(code: int) -> NoReturn:
    """Without taking the interpreter down, which could wait for operations of a group that is no more."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main(sys.argv[1:]))
