"""Whether processes of this user may read each other's memory, which the transport `local` lives on."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdserve.config import Config
from pdserve.doctor.findings import Finding, ok, warning

_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_RESTRICTED: Final = 2
"""From this scope on, only privileged processes may look."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_of_a_child() -> int:
    """The errno of reading 8 bytes of another process of this user; 0 if they could be read."""
    cat = shutil.which("cat")
    if cat is None:
        return errno.ENOENT
    libc = ctypes.CDLL(None, use_errno=True)
    with subprocess.Popen([cat], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:  # noqa: S603
        try:
            address = int(Path(f"/proc/{child.pid}/maps").read_text().partition("-")[0], 16)
            seen = ctypes.create_string_buffer(8)
            to = _IoVec(ctypes.addressof(seen), 8)
            of = _IoVec(address, 8)
            got = libc.process_vm_readv(child.pid, ctypes.byref(to), 1, ctypes.byref(of), 1, 0)
            return 0 if got == 8 else ctypes.get_errno()
        except (OSError, ValueError) as error:
            return error.errno or errno.EIO if isinstance(error, OSError) else errno.EIO
        finally:
            child.kill()


def check_ptrace(config: Config, read: Callable[[], int] = read_of_a_child, yama: Path = _YAMA) -> list[Finding]:
    """Nothing if `local` is not among the transports. A warning, as links fall back to the next transport."""
    if "local" not in config.transports:
        return []
    reason = ""
    try:
        if (scope := int(yama.read_text())) >= _RESTRICTED:
            reason = f"kernel.yama.ptrace_scope is {scope}"
    except (OSError, ValueError):
        reason = ""
    if not reason and (code := read()):
        reason = f"process_vm_readv: {os.strerror(code)}"
    if not reason:
        return [ok("ptrace", "processes of this user may read each other's memory")]
    return [
        warning(
            "ptrace",
            f"the transport local cannot be used ({reason}); KV takes the next one, which is slower",
            "set kernel.yama.ptrace_scope to 0 or 1; in a container allow process_vm_readv in its seccomp profile; or "
            "take `local` out of transfer.transports",
        )
    ]
