"""Reading the memory of another process on this host: `process_vm_readv` through ctypes, without the GIL.

The kernel copies straight from the pages of one process into those of another: one copy, no shared allocation, nothing
to do for the process that is read. It allows this by the rules of ptrace (man 2 process_vm_readv, man 2 ptrace): same
user, same pid namespace, the target "dumpable", and the consent of a security module such as Yama.

Pieces of memory are flat arrays of unsigned 64-bit numbers: address, length in bytes, address, length, ... On a 64-bit
host this is an array of the kernel's `struct iovec`.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import TypeAlias

from pdserve.kv_views import PoolViews

Pieces: TypeAlias = "array[int]"
PIECES_TYPECODE = "Q"

IOV_MAX = 1024
"""Pieces of either side that one call may name (UIO_MAXIOV)."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = 2**64 - 1

_libc = ctypes.CDLL(None, use_errno=True)  # CDLL lets go of the GIL for the time of a call
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_prctl = _libc.prctl
_prctl.restype = ctypes.c_int
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of the stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_PYBUF_SIMPLE = 0
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.restype = None
_release_buffer.argtypes = (ctypes.c_void_p,)


def pieces_of(views: Iterable[memoryview]) -> Pieces:
    """Where C-contiguous buffers lie, in order; empty ones are left out.

    The addresses hold as long as the caller keeps the views.
    """
    if isinstance(views, PoolViews):
        return views.pieces
    pieces = array(PIECES_TYPECODE)
    buffer = _PyBuffer()
    buffer_at = ctypes.addressof(buffer)
    for view in views:
        nbytes = view.nbytes
        if not nbytes:
            continue
        if view.readonly:
            # ctypes takes no read-only memory, and numpy needs three times as long to say where it lies.
            _get_buffer(view, buffer_at, _PYBUF_SIMPLE)
            pieces.append(buffer.buf)
            _release_buffer(buffer_at)
        else:
            pieces.append(ctypes.addressof(ctypes.c_char.from_buffer(view)))
        pieces.append(nbytes)
    return pieces


def read(pid: int, source: Pieces, destination: Pieces) -> None:
    """Copy `source`, of process `pid`, to `destination`, of this one; both in order and equally long in all.

    The destination must be writable memory that the caller keeps alive; addresses of the source may be anything. Raises
    ValueError if the lengths differ, and OSError if not all of it could be read, with part of the destination written:
    EPERM (not allowed), ESRCH (no such process any more), EFAULT (no such memory), EINVAL (absurd lengths), ENOSYS.
    """
    nbytes = sum(source[1::2])
    if nbytes != sum(destination[1::2]):
        raise ValueError(f"source of {nbytes} bytes, destination of {sum(destination[1::2])}")
    if not nbytes:
        return
    done = _call(pid, source, destination)
    if done == nbytes:
        return
    source_ends, destination_ends = (list(accumulate(pieces[1::2])) for pieces in (source, destination))
    while done < nbytes:
        done += _call(pid, _from(source, source_ends, done), _from(destination, destination_ends, done))


def _from(pieces: Pieces, ends: list[int], done: int) -> Pieces:
    """As many pieces as one call takes, without the first `done` bytes of all. `ends` are the cumulative lengths."""
    first = bisect_right(ends, done)
    part = pieces[2 * first : 2 * (first + IOV_MAX)]
    skip = done - (ends[first] - part[1])
    part[0] += skip
    part[1] -= skip
    return part


def _call(pid: int, source: Pieces, destination: Pieces) -> int:
    """One system call: how many bytes it copied, at least 1. The shorter side limits it, and `IOV_MAX` pieces."""
    source_address, source_length = source.buffer_info()
    destination_address, destination_length = destination.buffer_info()
    num_source, num_destination = (min(length // 2, IOV_MAX) for length in (source_length, destination_length))
    copied: int = _readv(pid, destination_address, num_destination, source_address, num_source, 0)
    if copied > 0:
        return copied
    code = ctypes.get_errno() if copied < 0 else errno.EFAULT
    raise OSError(code, f"cannot read the memory of process {pid}: {os.strerror(code)}")


class PtraceConsent:
    """Whom this process lets read its memory where Yama asks for consent (`kernel.yama.ptrace_scope` 1).

    Yama keeps one name per process. The first reader is named by its pid; as soon as a second one is needed at the
    same time, any process of this user may read, which is what a host without Yama allows anyway. One instance per
    process, used from one thread.
    """

    def __init__(self) -> None:
        self._pids: list[int] = []

    def give(self, pid: int) -> bool:
        """Let process `pid` read. False if this kernel has no Yama, so that this is not what the reader lacks."""
        self._pids.append(pid)
        if self._declare():
            return True
        self._pids.remove(pid)
        return False

    def withdraw(self, pid: int) -> None:
        """Take back one `give` that returned True."""
        self._pids.remove(pid)
        self._declare()

    def _declare(self) -> bool:
        pids = set(self._pids)
        value = 0 if not pids else pids.pop() if len(pids) == 1 else _PR_SET_PTRACER_ANY
        return bool(_prctl(_PR_SET_PTRACER, value, 0, 0, 0) == 0)


PTRACE_CONSENT = PtraceConsent()
