"""Memory of a GPU that exists only as numbers."""

from __future__ import annotations


class FakeMemory:
    """100 bytes, of which other processes have 10; implements `DeviceMemory`."""

    def __init__(self) -> None:
        self.others = 10
        self.libraries = 2
        self.in_use = 0
        self.cached = 0
        self._peak = 0

    def free(self) -> int:
        """See `DeviceMemory`."""
        return 100 - self.others - self.libraries - self.in_use - self.cached

    def total(self) -> int:
        """See `DeviceMemory`."""
        return 100

    def reserved(self) -> int:
        """See `DeviceMemory`."""
        return self.in_use + self.cached

    def allocated(self) -> int:
        """See `DeviceMemory`."""
        return self.in_use

    def peak(self) -> int:
        """See `DeviceMemory`."""
        return self._peak

    def reset_peak(self) -> None:
        """See `DeviceMemory`."""
        self._peak = self.in_use

    def release(self) -> None:
        """See `DeviceMemory`."""
        self.cached = 0

    def use(self, nbytes: int) -> None:
        """Allocate, or if negative free."""
        self.in_use += nbytes
        self._peak = max(self._peak, self.in_use)
