"""How large a KV pool a GPU has room for: what weights and the largest step leave of the memory that may be used.

The largest step is run rather than predicted: what it takes depends on kernels, libraries and the allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.errors import ConfigError

_GIB = 2.0**30


class DeviceMemory(Protocol):
    """Memory of one device in bytes: as the device counts it, and as the allocator of this process does."""

    def free(self) -> int:
        """Free on the device."""

    def total(self) -> int:
        """Of the device."""

    def reserved(self) -> int:
        """What the allocator has taken from the device."""

    def allocated(self) -> int:
        """What of that is in use."""

    def peak(self) -> int:
        """The most that was in use since `reset_peak`; all submitted work is complete."""

    def reset_peak(self) -> None:
        """Begin anew."""

    def release(self) -> None:
        """Give what is reserved and not in use back to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Where the memory goes, in bytes."""

    total: int
    """Of the device."""
    free: int
    """Left with the weights loaded and everything else released, other processes taken into account."""
    weights: int
    """In use while no step runs."""
    step: int
    """Beside that, by the largest step."""
    libraries: int
    """Taken by this process since `MemoryProfiler` was made, past the allocator: kernels, communicators."""

    def pool_nbytes(self, fraction: float) -> int:
        """Bytes for a KV pool of a worker that may take `fraction` of the device for everything. Raises ConfigError,
        with the whole account, if nothing is left."""
        allowed = int(self.total * fraction) - self.weights - self.libraries - self.step
        room = min(allowed, self.free - self.step)
        if room <= 0:
            raise ConfigError(
                f"gpu_memory_fraction: {fraction:g} of {self.total / _GIB:.2f} GiB leaves no room for KV: weights take "
                f"{self.weights / _GIB:.2f} GiB, the largest step {self.step / _GIB:.2f} GiB, libraries "
                f"{self.libraries / _GIB:.2f} GiB, and {self.free / _GIB:.2f} GiB are free; allow more, compute fewer "
                "tokens in one step, or stop what else uses the device",
                field="gpu_memory_fraction",
            )
        return room


class MemoryProfiler:
    """Made before anything is loaded."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        memory.release()
        self._taken_by_others = self._past_allocator()

    def measure(self, largest_step: Callable[[], None]) -> MemoryProfile:
        """To be called with the weights loaded; `largest_step` keeps nothing."""
        memory = self._memory
        weights = memory.allocated()
        memory.reset_peak()
        largest_step()
        step = memory.peak() - weights
        memory.release()
        return MemoryProfile(
            total=memory.total(),
            free=memory.free(),
            weights=weights,
            step=step,
            libraries=max(0, self._past_allocator() - self._taken_by_others),
        )

    def _past_allocator(self) -> int:
        return self._memory.total() - self._memory.free() - self._memory.reserved()


class CudaMemory:
    """Implements `DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def total(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def reserved(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_reserved(self._device)

    def allocated(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """See `DeviceMemory`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
