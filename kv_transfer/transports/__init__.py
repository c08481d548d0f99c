"""The transports that a worker can be configured with. Each is imported when a worker asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence

from kv_transfer.transports.base import TransportKind
from pdserve.errors import ConfigError


class Registry(Mapping[str, TransportKind]):
    """Transports by name, best first; one that nobody asks for costs no import and needs no optional package."""

    def __init__(self, places: Mapping[str, tuple[str, str]]) -> None:
        """`places` says in which module, under which name, each `TransportKind` is."""
        self._places = places

    def __getitem__(self, name: str) -> TransportKind:
        """Raises KeyError for an unknown name, ConfigError for a transport whose package is not installed."""
        module_name, attribute = self._places[name]
        try:
            kind = vars(importlib.import_module(module_name))[attribute]
        except ImportError as error:
            raise ConfigError(
                f"transfer.transports: {name!r} needs a package that is not installed ({error}); "
                f"install it or leave {name!r} out",
                field="transfer.transports",
            ) from error
        assert isinstance(kind, TransportKind)
        return kind

    def __contains__(self, name: object) -> bool:
        """Whether there is such a transport, installed or not."""
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


TRANSPORTS: Mapping[str, TransportKind] = Registry(
    {
        "local": ("kv_transfer.transports.local", "LOCAL"),
        "tcp": ("kv_transfer.transports.tcp", "TCP"),
        "nixl": ("kv_transfer.transports.nixl", "NIXL"),
        "torch": ("kv_transfer.transports.torch_kind", "TORCH"),
        "grpc": ("kv_transfer.transports.grpc_raw", "GRPC"),
        "memory": ("kv_transfer.transports.memory", "MEMORY"),
    }
)


def select(names: Sequence[str], registry: Mapping[str, TransportKind]) -> dict[str, TransportKind]:
    """The registered transports of these names, in order.

    Raises ConfigError for a name that is not registered, or whose package is not installed.
    """
    unknown = [name for name in names if name not in registry]
    if unknown or not names:
        raise ConfigError(f"transports: expected some of {sorted(registry)}, got {list(names)}", field="transports")
    return {name: registry[name] for name in names}
