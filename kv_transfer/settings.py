"""From the deployment's configuration to the numbers of the hand-off protocol."""

from __future__ import annotations

from kv_transfer.config import TransferConfig
from pdserve.config import Config


def transfer_config(config: Config) -> TransferConfig:
    """What `transfer` and `health` of the configuration say; the protocol's other numbers are not configurable."""
    transfer, health = config.transfer, config.health
    return TransferConfig(
        transports=config.transports,
        heartbeat_s=health.heartbeat_s,
        peer_timeout_s=health.peer_timeout_s,
        lease_s=transfer.lease_s,
        stall_timeout_s=transfer.stall_timeout_s,
        preflight=transfer.preflight,
        tcp_port=transfer.tcp_port,
        chunk_timeout_s=transfer.chunk_timeout_s,
        target_chunk_bytes=transfer.chunk_bytes,
        # What the last step of a long prompt computes.
        tail_tokens=config.prefill.max_batch_tokens,
        codec=transfer.codec,
        accept_codecs=transfer.accept_codecs,
        credit_bytes=transfer.credit_bytes,
        max_pushing_per_link=transfer.max_pushing_per_link,
    )
