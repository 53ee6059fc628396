"""Compiles src/weft/kernels.c when weft is installed or a wheel is built, if there is a C compiler.

Without one weft is the same, only slower: this never fails an installation.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: no -march: the library runs on every processor of its kind, and chooses when it is loaded
_FLAGS = ["-std=gnu11", "-O3", "-shared", "-fPIC"]


class KernelsHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":  # of which an editable installation is one too
            return
        source = Path(self.root, "src", "weft", "kernels.c")
        library = source.with_name("libkernels.so")
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        made = library.with_suffix(f".{os.getpid()}")
        try:
            subprocess.run(
                [compiler[0], *_FLAGS, str(source), "-o", str(made)],
                check=True,
                capture_output=True,
                text=True,
            )
            made.replace(library)  # at once: one that is in use stays as it is
        except (OSError, subprocess.CalledProcessError) as error:
            made.unlink(missing_ok=True)
            library.unlink(missing_ok=True)
            why = getattr(error, "stderr", None) or str(error)
            self.app.display_warning(f"weft is installed without its loops in C: {why}")
            return
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append("src/weft/libkernels.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}"
