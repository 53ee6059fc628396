"""Compile src/weft/kernels.c when weft is installed or a wheel is built.

Without its kernels weft does the same, more slowly: a failure here, such as a missing C compiler,
is a warning and not an error.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: no -march: the library runs on every processor of its kind, and chooses code when it is loaded.
#: -ffp-contract=off: results are NumPy's to the bit; -fno-math-errno: square roots without a call
_FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]


class KernelsHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":  # an editable installation is one too
            return
        source = Path(self.root, "src", "weft", "kernels.c")
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name, "libkernels.so")
        try:
            _compile(source, library)
            if version == "editable":
                _replace(source.with_name(library.name), library)
        except Exception as error:
            why = getattr(error, "stderr", None) or error
            self.app.display_warning(f"weft is installed without its loops in C: {why}")
            return
        if version != "editable":
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["force_include"][str(library)] = f"weft/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{system}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel":
            self._folder.cleanup()


def _compile(source: Path, library: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    checksum = zlib.crc32(source.read_bytes())
    subprocess.run(
        [*compiler, *_FLAGS, f"-DSOURCE={checksum}u", str(source), "-o", str(library)],
        check=True,
        capture_output=True,
        text=True,
    )


def _replace(old: Path, new: Path) -> None:
    """Replace a file atomically: processes that have loaded the old one keep it."""
    beside = Path(shutil.copy(new, old.with_name(f"{old.name}.{os.getpid()}")))
    beside.replace(old)
