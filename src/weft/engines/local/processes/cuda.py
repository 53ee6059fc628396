"""CUDA as far as processes and their children are concerned.

A process that has initialised CUDA cannot be narrowed to one GPU any more, and children that it
forks cannot use CUDA. PyTorch does it in `torch.cuda.is_available()` already, unless a variable has
it ask NVML, which harms nobody.
"""

from __future__ import annotations

import ctypes
import os

#: the driver's library, and its answer to any question before cuInit
DRIVER, _NOT_INITIALIZED = "libcuda.so.1", 3


def is_initialized() -> bool:
    """Return whether this process has initialised CUDA."""
    try:
        driver = ctypes.CDLL(DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # nothing has even loaded it
    device = ctypes.c_int()
    return bool(driver.cuDeviceGet(ctypes.byref(device), 0) != _NOT_INITIALIZED)
