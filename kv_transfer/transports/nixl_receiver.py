"""The decode side of the `nixl` transport: one agent per worker, one thread that polls it, one ring per link.

A prefill worker writes into the ring of its link by itself and at any time, even after a fence. So the memory of a ring
is never given back while the worker lives: a late write can only spoil a frame in a ring, which its checksum shows, and
blocks of the pool are written by this process alone, so that they need no quarantine.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import Sink, TransportContext
from kv_transfer.transports.nixl_agent import Agent, Ring, call, name_of, new_agent
from kv_transfer.transports.nixl_sender import ADDRESS, CREDIT, HELLO, METADATA, NUMBER, TOKEN, TOKEN_NBYTES, WRITTEN
from kv_transfer.transports.torch_channel import NUM_BUFFERS, Buffer, Channel, PairError
from kv_transfer.transports.torch_lander import Lander
from pdserve.errors import ConfigError

logger = logging.getLogger(__name__)

_BUSY_S, _IDLE_PAUSE_S, _BUSY_PAUSE_S = 0.01, 1e-3, 50e-6
"""How long after the last notification polling stays frequent, and the pauses between polls."""


@dataclass(slots=True)
class _Mailbox:
    """Of one link: which messages have been written, or None to give up."""

    ring: Ring
    written: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)
    peer: str | None = None
    """Name of the prefill worker's agent, when it has introduced itself."""


class NixlPort:
    """The agent of a decode worker; any thread may call it."""

    def __init__(self, name: str) -> None:
        """Takes up to a second. Raises PairError."""
        self._agent: Agent = call(lambda: new_agent(name))
        self._lock = threading.Lock()
        self._expected: dict[bytes, _Mailbox] = {}
        """By token: links whose prefill worker has not come yet."""
        self._mailboxes: dict[str, _Mailbox] = {}
        """By name of the prefill worker's agent."""
        self._idle_rings = [Ring(self._agent, NUM_BUFFERS)]
        self._wanted = threading.Event()
        """There are links, so that polling makes sense."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl-poll")
        self._thread.start()

    def open(self) -> tuple[_Mailbox, dict[str, str]]:
        """A ring for a new link, and what its prefill worker must know. Raises PairError."""
        token = secrets.token_bytes(TOKEN_NBYTES)
        with self._lock:
            ring = self._idle_rings.pop() if self._idle_rings else Ring(self._agent, NUM_BUFFERS)
            metadata = call(self._agent.get_agent_metadata)
            mailbox = self._expected[token] = _Mailbox(ring)
        self._wanted.set()
        attributes = {
            METADATA: base64.b64encode(metadata).decode(),
            ADDRESS: str(ring.address),
            TOKEN: token.hex(),
        }
        return mailbox, attributes

    def grant(self, mailbox: _Mailbox, num_granted: int) -> None:
        """Tell the prefill worker how many messages it may have sent in all. Raises PairError."""
        assert mailbox.peer is not None, "granted to nobody"
        peer, note = mailbox.peer, CREDIT + NUMBER.pack(num_granted)
        with self._lock:
            call(lambda: self._agent.send_notif(peer, note))

    def release(self, mailbox: _Mailbox) -> None:
        """The link is over; its ring may serve another."""
        with self._lock:
            self._expected = {token: box for token, box in self._expected.items() if box is not mailbox}
            peer = mailbox.peer
            if peer is not None and self._mailboxes.pop(peer, None) is not None:
                try:
                    call(lambda: self._agent.remove_remote_agent(peer))
                except PairError as error:
                    logger.debug("forgetting NIXL agent %s: %s", peer, error)
            self._idle_rings.append(mailbox.ring)
            if not self._expected and not self._mailboxes:
                self._wanted.clear()

    def close(self) -> None:
        """End the thread. No link may be left."""
        self._closed = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        heard_at = 0.0
        while not self._closed:
            self._wanted.wait()
            try:
                heard = self._poll()
            except Exception:
                logger.exception("polling NIXL")
                heard = False
            now = time.monotonic()
            heard_at = now if heard else heard_at
            time.sleep(_BUSY_PAUSE_S if now - heard_at < _BUSY_S else _IDLE_PAUSE_S)

    def _poll(self) -> bool:
        with self._lock:
            notes = self._agent.get_new_notifs()
            for agent, messages in notes.items():
                for message in messages:
                    try:
                        self._take(name_of(agent), message)
                    except (PairError, struct.error) as error:
                        logger.warning("NIXL agent %s sent what is no notification of ours: %s", agent, error)
            if not self._idle_rings:
                # Registering takes milliseconds, which `open` should not cost the event loop.
                self._idle_rings.append(Ring(self._agent, NUM_BUFFERS))
        return bool(notes)

    def _take(self, agent: str, message: bytes) -> None:
        mailbox = self._mailboxes.get(agent)
        if message.startswith(HELLO):
            mailbox = self._expected.pop(message[1 : 1 + TOKEN_NBYTES], None)
            if mailbox is None:
                return  # of a link that is over, or nobody we know
            name = name_of(call(lambda: self._agent.add_remote_agent(message[1 + TOKEN_NBYTES :])))
            mailbox.peer = name
            self._mailboxes[name] = mailbox
        elif message.startswith(WRITTEN) and mailbox is not None:
            mailbox.written.put(NUMBER.unpack_from(message, 1)[0])


class NixlReceiveChannel:
    """See `Channel`; only receives. Buffers are the slots of the ring, used in order."""

    def __init__(self, port: NixlPort, mailbox: _Mailbox, timeout_s: float) -> None:
        self._port = port
        self._mailbox = mailbox
        self._timeout_s = timeout_s
        self._num_buffers = 0
        self._num_posted = 0
        self._written: set[int] = set()

    def buffer(self) -> Buffer:
        """The next slot."""
        self._num_buffers += 1
        assert self._num_buffers <= NUM_BUFFERS, "more buffers than the ring has"
        return self._mailbox.ring.buffer(self._num_buffers - 1)

    def send(self, buffer: Buffer, nbytes: int) -> _Arrival:
        """Nothing goes this way."""
        raise AssertionError("the decode side of a pair does not send")

    def recv(self, buffer: Buffer) -> _Arrival:
        """See `Channel`. Grants the slot to the prefill worker."""
        number = self._num_posted
        assert self._mailbox.ring.slot_of(buffer) == number % NUM_BUFFERS, "slots are used in order"
        self._num_posted += 1
        self._port.grant(self._mailbox, self._num_posted)
        return _Arrival(self, number)

    def interrupt(self) -> None:
        """See `Channel`."""
        self._mailbox.written.put(None)

    def abort(self) -> None:
        """See `Channel`."""
        self._port.release(self._mailbox)

    def await_message(self, number: int) -> None:
        """Return when message `number` is in its slot. Raises PairError if the prefill worker falls silent."""
        while number not in self._written:
            try:
                written = self._mailbox.written.get(timeout=self._timeout_s)
            except queue.Empty:
                raise PairError(f"the prefill worker has been silent for {self._timeout_s:g} s") from None
            if written is None:
                raise PairError("the pair was closed")
            self._written.add(written)
        self._written.remove(number)


class _Arrival:
    """See `Pending`."""

    def __init__(self, channel: NixlReceiveChannel, number: int) -> None:
        self._channel = channel
        self._number = number

    def wait(self) -> None:
        """See `Pending`."""
        self._channel.await_message(self._number)


class NixlReceiver:
    """See `ReceivingTransport`."""

    def __init__(self, context: TransportContext, sink: Sink, name: str) -> None:
        self._context = context
        self._sink = sink
        self._name = name
        self._timeout_s = context.config.peer_timeout_s
        self._port: NixlPort | None = None
        self._landers: dict[LinkId, Lander] = {}
        self._ending: list[Lander] = []

    def register(self, server: grpc.aio.Server) -> None:
        """Has connections of its own."""

    async def start(self) -> None:
        """Create the agent. Raises ConfigError if NIXL cannot."""
        try:
            self._port = await asyncio.to_thread(NixlPort, f"decode-{self._context.incarnation}")
        except PairError as error:
            raise ConfigError(
                f"transfer.transports: nixl does not start: {error}", field="transfer.transports"
            ) from error

    async def aclose(self) -> None:
        """See `ReceivingTransport`."""
        for link in list(self._landers):
            self.fence(link)
        ending, self._ending = self._ending, []
        for lander in ending:
            await asyncio.to_thread(lander.join)
        port, self._port = self._port, None
        if port is not None:
            await asyncio.to_thread(port.close)

    def open(self, link: LinkId, offer: Endpoint) -> Endpoint | None:
        """Start to wait for the prefill worker."""
        port = self._port
        if port is None:
            return None
        self.fence(link)
        try:
            mailbox, attributes = port.open()
        except PairError as error:
            logger.warning("no NIXL pair for KV link %s: %s", link, error)
            return None

        def join(stopped: Callable[[], bool]) -> Channel | None:
            deadline = time.monotonic() + self._timeout_s
            while mailbox.peer is None:
                if stopped() or time.monotonic() > deadline:
                    port.release(mailbox)
                    return None
                time.sleep(_IDLE_PAUSE_S)
            return NixlReceiveChannel(port, mailbox, self._timeout_s)

        self._landers[link] = Lander(link, self._sink, join)
        return Endpoint(self._name, attributes)

    def fence(self, link: LinkId) -> None:
        """Nothing is claimed for this link any more."""
        self._ending = [lander for lander in self._ending if not lander.ended]
        lander = self._landers.pop(link, None)
        if lander is not None:
            lander.stop()
            self._ending.append(lander)
