"""Who may drain a worker that cannot ask for certificates."""

from __future__ import annotations

import socket

import pytest

from pdserve.security.local_guard import is_this_machine


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:50051", "ipv4:127.9.9.9:1", "unix:", "unix:/run/x.sock"])
def test_loopback_and_sockets_of_files_are_this_machine(peer: str) -> None:
    assert is_this_machine(peer)


def test_an_address_of_an_interface_is_this_machine() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing; the kernel only picks the address that it would send from.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route anywhere")
        host = probe.getsockname()[0]
    assert is_this_machine(f"ipv4:{host}:41234")


@pytest.mark.parametrize("peer", ["ipv4:192.0.2.1:50051", "ipv6:%5B2001:db8::7%5D:41234"])
def test_others_are_not_where_any_address_can_be_bound_to(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """net.ipv4.ip_nonlocal_bind and net.ipv6.ip_nonlocal_bind, which load balancers set."""

    class Lenient(socket.socket):
        """As these settings make it."""

        def bind(self, address: object) -> None:
            """Succeeds."""
            super().bind(("", 0))

    monkeypatch.setattr(socket, "socket", Lenient)
    assert not is_this_machine(peer)


@pytest.mark.parametrize("peer", ["ipv6:%5B::1%5D:41234", "ipv6:%5B::ffff:127.0.0.1%5D:41234", "ipv6:%5B0:0::1%5D:1"])
def test_an_address_is_this_machine_however_it_is_written(peer: str) -> None:
    assert is_this_machine(peer)


@pytest.mark.parametrize(
    "peer", ["ipv4:192.0.2.1:50051", "ipv6:%5B2001:db8::7%5D:41234", "ipv4:127.0.0.1.evil.example:1", "vsock:3:1", ""]
)
def test_others_are_not(peer: str) -> None:
    assert not is_this_machine(peer)
