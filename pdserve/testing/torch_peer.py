"""A prefill worker's end of a `torch` or `nixl` pair as a process of its own, to be killed or frozen by a test.

`python -m pdserve.testing.torch_peer TIMEOUT_S DEVICE KIND` prints the attributes of its offer as a line of
JSON, reads those of the endpoint likewise, and posts frames 0, 1, 2, ... of `NBYTES` there until it is stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen

from kv_transfer.config import TransferConfig
from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports import TRANSPORTS
from kv_transfer.transports.base import ReceivingTransport, TransportContext, TransportKind
from pdserve.kv_layout import KvLayout
from pdserve.testing.frame_sink import random_frame
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.types import DecodeTarget

LINK = LinkId("prefill-process", 1)
NBYTES = 700_000


def transport_context(incarnation: str, timeout_s: float, device: str = "cpu") -> TransportContext:
    """A worker that has a small pool, says that it is on `device`, and gives its peers `timeout_s`."""
    layout = KvLayout(dtype="float16", block_size=16, num_layers=1, num_kv_heads=1, head_dim=16)
    config = TransferConfig(peer_timeout_s=timeout_s)
    return TransportContext(incarnation=incarnation, store=NumpyBlockStore(layout, 1), config=config, device=device)


@contextmanager
def prefill_process(
    receiver: ReceivingTransport, timeout_s: float, device: str = "cpu", kind: str = "torch"
) -> Iterator[Popen[str]]:
    """A process that posts frames over LINK, which `receiver` opens for it."""
    command = [sys.executable, "-m", "pdserve.testing.torch_peer", str(timeout_s), device, kind]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            offer = json.loads(process.stdout.readline())
            endpoint = receiver.open(LINK, Endpoint(kind, offer))
            assert endpoint is not None
            process.stdin.write(json.dumps(dict(endpoint.attributes)) + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


async def _post_for_ever(timeout_s: float, device: str, kind: TransportKind) -> None:
    target = DecodeTarget(worker_id="d", incarnation="d", address="")
    context = transport_context(LINK.prefill_incarnation, timeout_s, device)
    sys.stdout.write(json.dumps(dict(kind.offer(context).attributes)) + "\n")
    sys.stdout.flush()
    attributes = json.loads(sys.stdin.readline())
    sender = kind.sending(context, Endpoint(kind.name, attributes), target, LINK)
    await sender.connect()
    for seq in itertools.count():
        await sender.post(random_frame(seq, [NBYTES]), lambda: None)


if __name__ == "__main__":
    asyncio.run(_post_for_ever(float(sys.argv[1]), sys.argv[2], TRANSPORTS[sys.argv[3]]))
