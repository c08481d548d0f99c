"""The transports that a worker can be configured with, and the choice of one for a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kv_transfer.transports.base import TransportKind
from kv_transfer.transports.grpc_raw import GRPC
from kv_transfer.transports.memory import MEMORY
from pdserve.errors import ConfigError, IncompatibleWorkersError

TRANSPORTS: Mapping[str, TransportKind] = {kind.name: kind for kind in (GRPC, MEMORY)}


def select(names: Sequence[str], registry: Mapping[str, TransportKind]) -> dict[str, TransportKind]:
    """The registered transports of these names, in order. Raises ConfigError for a name that is not registered."""
    unknown = [name for name in names if name not in registry]
    if unknown or not names:
        raise ConfigError(f"transports: expected some of {sorted(registry)}, got {list(names)}", field="transports")
    return {name: registry[name] for name in names}


def choose(prefill: Sequence[str], decode: Sequence[str]) -> str:
    """The first of the prefill worker's transports that the decode worker has too.

    Raises IncompatibleWorkersError if there is none.
    """
    for name in prefill:
        if name in decode:
            return name
    raise IncompatibleWorkersError(
        f"transports: prefill has {list(prefill)}, decode has {list(decode)}, none in common"
    )
