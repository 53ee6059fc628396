"""Where tests need a GPU: whether this machine has one that can be used."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

from tests.support import HANGS

#: set to "required", tests that need a GPU fail where there is none
REQUIRED = "WEFT_TEST_GPU"

#: in a process of its own: one that has used CUDA cannot fork, and keeps half a gigabyte of the GPU
_TRIAL = "import torch; assert torch.ones(2, device='cuda').sum().item() == 2"


@cache
def obstacle() -> str:
    """Why tests cannot use a GPU here; "" if they can."""
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=HANGS
    )
    if done.returncode == 0:
        return ""
    last = done.stderr.strip().splitlines()[-1:] or [f"a trial ended with {done.returncode}"]
    return f"no GPU that PyTorch can use: {last[0]}"


def require_gpu() -> None:
    """Skip the test where there is no GPU; fail it where there has to be one."""
    if reason := obstacle():
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(f"{REQUIRED}=required, but {reason}")
        pytest.skip(reason)


def require_any_names() -> None:
    """Skip a test that names GPUs which do not exist: where the driver lists its GPUs, CUDA and
    weft take no others."""
    if os.path.exists("/proc/driver/nvidia/gpus"):
        pytest.skip("the driver of this machine knows which GPUs there are")
