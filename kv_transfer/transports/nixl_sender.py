"""The prefill side of a NIXL pair as a channel: messages are written into the ring of the decode worker.

    P  hello (who I am) ─▶ D      D  credit (slots granted so far) ─▶ P      P  write into slot, then its number ─▶ D

The k-th message goes to slot k modulo the ring, once D has granted it: D reads a slot before it grants it again.
"""

from __future__ import annotations

import base64
import struct
import threading
from collections.abc import Mapping

from kv_transfer.transports.nixl_agent import Agent, Handle, Ring, call, descriptors, granules, name_of, new_agent, poll
from kv_transfer.transports.torch_channel import NUM_BUFFERS, Buffer, PairError

HELLO, CREDIT, WRITTEN = b"H", b"C", b"W"
"""First byte of a notification. After it: token and metadata; slots granted; number of the message."""
NUMBER = struct.Struct("<Q")
TOKEN_NBYTES = 16
METADATA, ADDRESS, TOKEN = "metadata", "address", "token"
"""Attributes of the endpoint: the decode worker's agent and ring, and the word that proves that P read them."""


class NixlSendChannel:
    """See `Channel`; only sends. Belongs to one thread at a time, except for `interrupt`."""

    def __init__(self, agent: Agent, attributes: Mapping[str, str], timeout_s: float) -> None:
        """Introduces itself and waits for the first grant. Raises PairError."""
        self._agent = agent
        self._timeout_s = timeout_s
        self._interrupted = threading.Event()
        self._num_sent = 0
        self._num_granted = 0
        self._num_buffers = 0
        self._ring = Ring(agent, NUM_BUFFERS + 1)  # one for the sign of life
        self._local = descriptors(agent, None, self._ring.address, self._ring.num_slots)
        try:
            metadata = base64.b64decode(attributes[METADATA])
            address, token = int(attributes[ADDRESS]), bytes.fromhex(attributes[TOKEN])
        except (KeyError, ValueError) as error:
            raise PairError(f"NIXL endpoint of the decode worker: {error!r}") from error
        self._peer = name_of(call(lambda: agent.add_remote_agent(metadata)))
        self._remote = descriptors(agent, self._peer, address, NUM_BUFFERS)
        hello = HELLO + token + call(agent.get_agent_metadata)
        call(lambda: agent.send_notif(self._peer, hello))
        self._await_grant()

    def buffer(self) -> Buffer:
        """The next slot of our own ring."""
        self._num_buffers += 1
        assert self._num_buffers <= self._ring.num_slots, "more buffers than the ring has"
        return self._ring.buffer(self._num_buffers - 1)

    def send(self, buffer: Buffer, nbytes: int) -> _Write:
        """See `Channel`. Waits for the grant of a slot."""
        self._await_grant()
        number = self._num_sent
        self._num_sent += 1
        handle = call(
            lambda: self._agent.make_prepped_xfer(
                "WRITE",
                self._local,
                granules(self._ring.slot_of(buffer), nbytes),
                self._remote,
                granules(number % NUM_BUFFERS, nbytes),
                WRITTEN + NUMBER.pack(number),
            )
        )
        return _Write(self, handle, call(lambda: self._agent.transfer(handle)))

    def recv(self, buffer: Buffer) -> _Write:
        """Nothing comes this way."""
        raise AssertionError("the prefill side of a pair does not receive")

    def interrupt(self) -> None:
        """See `Channel`."""
        self._interrupted.set()

    def abort(self) -> None:
        """Disconnect. What a write still reads is our ring, which lives as long as the agent."""
        self._interrupted.set()
        call(lambda: self._agent.remove_remote_agent(self._peer))

    def finish(self, handle: Handle, state: str) -> None:
        """Wait for a write; the buffer is then free."""

        def is_complete() -> bool:
            nonlocal state
            if state == "PROC":
                state = call(lambda: self._agent.check_xfer_state(handle))
            if state == "ERR":
                raise PairError("a NIXL write failed")
            return state == "DONE"

        poll(is_complete, self._interrupted.is_set, self._timeout_s, "a NIXL write was not complete")
        call(handle.release)

    def _await_grant(self) -> None:
        poll(self._has_grant, self._interrupted.is_set, self._timeout_s, "the decode worker granted no slot")

    def _has_grant(self) -> bool:
        if self._num_sent == self._num_granted:
            for note in call(self._agent.get_new_notifs).get(self._peer, ()):
                if note.startswith(CREDIT):
                    self._num_granted = max(self._num_granted, *NUMBER.unpack_from(note, 1))
        return self._num_sent < self._num_granted


class _Write:
    """See `Pending`."""

    def __init__(self, channel: NixlSendChannel, handle: Handle, state: str) -> None:
        self._channel = channel
        self._handle = handle
        self._state = state

    def wait(self) -> None:
        """See `Pending`."""
        self._channel.finish(self._handle, self._state)


def join_as_prefill(name: str, attributes: Mapping[str, str], timeout_s: float) -> NixlSendChannel:
    """Connect an agent of its own, called `name`, to a decode worker. Blocks. Raises PairError."""
    return NixlSendChannel(call(lambda: new_agent(name)), attributes, timeout_s)
