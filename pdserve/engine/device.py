"""Names of devices and dtypes as torch objects, and moving host arrays without a stall."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`, ordered before later work of the current stream; on CPU the tensor shares its memory."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    # From pinned memory the copy is asynchronous; the caching host allocator keeps the buffer until the copy is done.
    return host.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """`tensor` as an array, once the work that makes it is complete; on CPU the array shares its memory."""
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array
