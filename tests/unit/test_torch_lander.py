"""A lander in front of a peer that says what no sender would say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kv_transfer.messages import LinkId
from kv_transfer.transports.torch_channel import Buffer, PairError
from kv_transfer.transports.torch_envelope import Envelope
from kv_transfer.transports.torch_lander import Lander
from kv_transfer.transports.torch_send_flow import write_envelope
from pdserve.testing.frame_sink import FrameSink, random_frame

LINK = LinkId("prefill", 1)


class Received:
    """A message that comes when it is waited for."""

    def __init__(self, buffer: Buffer, left: list[Envelope]) -> None:
        self._buffer = buffer
        self._left = left

    def wait(self) -> None:
        if not self._left:
            raise PairError("the script is over")
        write_envelope(self._buffer, self._left.pop(0))


class ScriptedChannel:
    """Only what a lander needs of a `Channel`."""

    def __init__(self, envelopes: Sequence[Envelope]) -> None:
        self._left = list(envelopes)

    def buffer(self) -> Buffer:
        return Buffer.allocate()

    def recv(self, buffer: Buffer) -> Received:
        return Received(buffer, self._left)

    def send(self, buffer: Buffer, nbytes: int) -> Received:
        raise AssertionError("a lander sends nothing")

    def interrupt(self) -> None:
        """Nothing waits."""

    def abort(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("offset", "nbytes", "problem"),
    [(300, 300, "a message that goes beyond its frame"), (0, 300, "a message of another frame in the middle of one")],
)
def test_a_message_that_does_not_continue_its_frame_ends_the_pair(
    offset: int, nbytes: int, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    frame, sink = random_frame(0, [500]), FrameSink()
    script = [Envelope(frame.header, 500, 0, 300), Envelope(frame.header, 500, offset, nbytes)]
    lander = Lander(LINK, sink, lambda _: ScriptedChannel(script))
    lander.join()
    assert problem in caplog.text and not sink.order
