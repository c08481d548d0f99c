"""Memory of this process that others may map: a memfd, its mapping, and the seals that keep both sides safe.

A memfd has no name in any file system, so nothing is left behind by a process that is killed, and the pages last as
long as anybody maps them: the end of their owner is no fault (SIGBUS) for a reader. Whoever is to map it gets a
descriptor, over a Unix socket (SCM_RIGHTS) or by inheritance, and nobody else can. What the descriptor allows is
limited by seals (man 2 fcntl, "File Sealing"), which the kernel enforces whatever a process does later:

- nobody can shrink it, so that no access to a mapping can fault; `attach` takes no memory without this seal;
- after `seal_writes` nobody can write to it or map it for writing any more, beside mappings that exist already.

The mapping begins at a multiple of the size of a huge page, so that the kernel can use huge pages where it is allowed
to, and vectors of 64 bytes never lie across two cache lines.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Self

HUGE_PAGE_NBYTES = 2 << 20
"""Of x86-64 and most of aarch64; where they are larger nothing but their use is lost."""

_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; where vm.memfd_noexec is 2 it is required, older kernels refuse it
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1
_MADV_COLLAPSE = 25  # Linux 6.1
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MAP_FAILED = 2**64 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mincore = _libc.mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


_live: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
"""All of this process: what lies at an address is a property of the process, whoever asked for the memory."""
_live_lock = threading.Lock()


class SharedMemory:
    """A memfd, mapped. `numpy.asarray` of it is its bytes (uint8), and keeps it alive.

    With the last reference it is unmapped, and its descriptor closed: who works with addresses holds the object.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        """Use `create` or `attach`. Takes over `fd`."""
        self.nbytes = nbytes
        self.writable = writable
        self._fd = fd
        self._small: Sequence[int] = range(0, nbytes, HUGE_PAGE_NBYTES)
        """Where huge pages could begin and, as far as is known, none does."""
        reserved_nbytes = nbytes + HUGE_PAGE_NBYTES
        try:
            reserved = _map(None, reserved_nbytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        except OSError:
            os.close(fd)
            raise
        self.address = -(-reserved // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
        # At the end of the process the kernel unmaps; daemon threads may still be reading.
        weakref.finalize(self, _release, fd, reserved, reserved_nbytes).atexit = False
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _map(self.address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        # Advice that is not taken costs speed, nothing else.
        _madvise(self.address, nbytes, mmap.MADV_HUGEPAGE)
        with _live_lock:
            _live.add(self)

    @staticmethod
    def holding(address: int) -> SharedMemory | None:
        """The shared memory of this process that this address of it lies in, if there is one. Any thread."""
        with _live_lock:
            return next((memory for memory in _live if 0 <= address - memory.address < memory.nbytes), None)

    @classmethod
    def create(cls, nbytes: int, name: str = "pdserve-kv") -> Self:
        """New memory of zeros; pages are taken as they are touched. `name` is what /proc/PID/maps shows.

        Raises OSError where the kernel has no memfd or does not allow it.
        """
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = os.memfd_create(name, flags)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes, writable=True)

    @classmethod
    def attach(cls, fd: int, *, writable: bool = False) -> Self:
        """Map memory that another process has created. Takes over `fd`, also if it fails.

        Raises OSError: not a memfd (EINVAL), one that its owner could shrink under us (EPERM), not to be written
        (EPERM, EACCES).
        """
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(errno.EPERM, "the memory can be shrunk by its owner")
            nbytes = os.fstat(fd).st_size
            if not nbytes:
                raise OSError(errno.EINVAL, "the memory is empty")
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes, writable=writable)

    def seal_writes(self) -> None:
        """From now on nobody can write it but through mappings that exist. Irreversible.

        Raises OSError on kernels before 5.1.
        """
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)

    def descriptor(self, *, writable: bool = False) -> int:
        """A new descriptor to pass on, which the caller closes; by default one that allows no writing.

        Raises OSError, for want of descriptors or of /proc.
        """
        if writable:
            return fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 0)
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def collapse(self) -> bool:
        """Put pages that have been touched together into huge ones, as far as the kernel can and will.

        Lasts a millisecond or two for each huge page that is made. True if nothing is left to be done. One thread.
        """
        # One by one: of a range the kernel leaves everything behind the first page that it cannot make huge.
        self._small = [begin for begin in self._small if not (self._is_used(begin) and self._collapse(begin))]
        return not self._small

    def _collapse(self, begin: int) -> bool:
        nbytes = min(HUGE_PAGE_NBYTES, self.nbytes - begin)
        return int(_madvise(self.address + begin, nbytes, _MADV_COLLAPSE)) == 0

    def _is_used(self, begin: int) -> bool:
        """Whether there is a page behind any address of this huge page; no costly call is made for one that is not."""
        nbytes = min(HUGE_PAGE_NBYTES, self.nbytes - begin)
        none = bytes(-(-nbytes // mmap.PAGESIZE))
        present = ctypes.create_string_buffer(len(none))
        return _mincore(self.address + begin, nbytes, present) != 0 or present.raw != none

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For numpy: the bytes themselves, uint8 [nbytes]; arrays keep this object alive."""
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, not self.writable)}


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    mapped: int = _mmap(address, nbytes, protection, flags, fd, 0)
    if mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
    return mapped


def _release(fd: int, address: int, nbytes: int) -> None:
    _munmap(address, nbytes)
    os.close(fd)
