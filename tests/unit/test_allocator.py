"""What becomes of freed memory: in processes of their own, as it is a setting of the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import resource
from kv_transfer.allocator import keep_freed_memory

if {keep}:
    keep_freed_memory()

def some_messages():
    return [bytes(b"x" * (1 << 20)) for _ in range(16)]

some_messages()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    some_messages()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*, keep: bool) -> int:
    """Of 160 messages of 1 MiB, 256 pages each."""
    code = COUNT.format(keep=keep)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_memory_of_messages_is_kept_for_the_next_ones() -> None:
    assert page_faults(keep=True) < 1000 < 10_000 < page_faults(keep=False)
