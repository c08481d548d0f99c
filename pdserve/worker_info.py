"""Who a worker process is: what its peers need to know to talk to it, and to decide that they must not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pdserve.kv_layout import KvLayout
from pdserve.types import DecodeTarget, Role

HOST_TRANSPORTS: Final = frozenset({"local", "tcp", "grpc", "memory"})
"""KV transports that move host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Constant for the life of the process. Fields are explained in common.proto."""

    worker_id: str
    incarnation: str
    role: Role
    address: str
    """host:port of the worker's gRPC server, as its peers reach it."""
    model: str
    model_fingerprint: str
    kv_layout: KvLayout
    num_blocks: int
    max_model_len: int
    transports: tuple[str, ...]
    """KV transports it can speak, best first."""
    version: str
    codecs: tuple[str, ...] = ("none",)
    """Encodings of KV on the wire: the one that a prefill worker uses, or all that a decode worker accepts."""
    prefill_chunk_tokens: int = 0
    """Prompt tokens that a decode worker computes in a step beside running sequences; 0 if it takes hand-offs only."""
    prefill_pause_s: float = 0.0
    """Seconds that these may take; where they would take longer it takes fewer. 0: however long they take."""

    @property
    def max_kv_tokens(self) -> int:
        """Tokens of the longest sequence that fits the model and this worker's KV pool. What grows by decoding, or has
        come by hand-off, keeps what its window shows."""
        if self.role is Role.DECODE:
            return self.kv_layout.longest_sequence(self.max_model_len, self.num_blocks)
        return self.max_prompt_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt that this worker can compute, if it computes any: all of them get room at once,
        whatever the window."""
        return min(self.max_model_len, self.num_blocks * self.kv_layout.block_size)

    @property
    def target(self) -> DecodeTarget:
        """This worker as the destination of a hand-off."""
        return DecodeTarget(worker_id=self.worker_id, incarnation=self.incarnation, address=self.address)

    @property
    def as_prefix_peer(self) -> WorkerInfo:
        """This worker as either end of a prefix fetch: KV is exact, and goes through host memory.

        Transports that have the device move KV would be used in both directions between two workers at once, which
        collectives on one device do not allow.
        """
        transports = tuple(name for name in self.transports if name in HOST_TRANSPORTS) or ("grpc",)
        return replace(self, transports=transports, codecs=("none",))

    def incompatibilities(self, other: WorkerInfo) -> list[str]:
        """Why KV of one must not be read by the other, each as "field ours != theirs"; empty if it may.

        What a prefill worker hands over to a decode worker may be rounded on the way. Prefixes and streams that move on
        are taken for what their receiver would have computed.
        """
        exact = not (self.role is Role.PREFILL and other.role is Role.DECODE)
        problems = [
            f"kv_layout.{problem}" for problem in self.kv_layout.incompatibilities(other.kv_layout, exact=exact)
        ]
        if self.model != other.model:
            problems.append(f"model {self.model!r} != {other.model!r}")
        if self.model_fingerprint != other.model_fingerprint:
            problems.append(f"model_fingerprint {self.model_fingerprint!r} != {other.model_fingerprint!r}")
        if not set(self.transports) & set(other.transports):
            problems.append(f"transports {list(self.transports)} and {list(other.transports)} have none in common")
        if not set(self.codecs) & set(other.codecs):
            problems.append(f"codecs {list(self.codecs)} and {list(other.codecs)} have none in common")
        return problems
