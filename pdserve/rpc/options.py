"""gRPC channel and server settings, in one tested place: grpcio ignores a misspelt option name without a word.

Keep-alive: clients ping every 30 s, also without calls, and servers allow it. gRPC's default server counts a ping more
often than every five minutes as abuse and closes the connection ("too many pings"), which would fail every call on it.
These pings only keep middle boxes from dropping idle connections; who is alive is decided by application heartbeats.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message on any port. A prompt of a million token ids takes about 5 MiB; KV chunks are about 1 MiB."""

Options = Sequence[tuple[str, int | str]]

_SIZES: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

CHANNEL_OPTIONS: Options = (
    *_SIZES,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A worker that comes back at its address is found within a second, not after gRPC's two minutes of back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two clients in one process must not share a connection whose end means "the peer has gone".
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: Options = (
    *_SIZES,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two servers on one port would each get half of the calls; a taken port must be an error.
    ("grpc.so_reuseport", 0),
)
"""Between processes of ours, which trust each other."""


def public_server_options(
    *, max_message_bytes: int, max_connections: int, max_streams_per_connection: int, min_ping_interval_s: float
) -> Options:
    """For a server that anybody may connect to."""
    own = dict(SERVER_OPTIONS) | {
        "grpc.max_receive_message_length": max_message_bytes,
        "grpc.max_allowed_incoming_connections": max_connections,
        "grpc.max_concurrent_streams": max_streams_per_connection,
        "grpc.http2.min_ping_interval_without_data_ms": round(min_ping_interval_s * 1e3),
        "grpc.http2.max_ping_strikes": 2,
        # A connection that says nothing is closed; gRPC's own default is two minutes.
        "grpc.server_handshake_timeout_ms": 10_000,
    }
    return tuple(own.items())
