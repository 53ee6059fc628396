"""Runs programs for Synkhronos one after the other, each as its own main program."""

import os
import runpy
import sys

import synkhronos

# they start a process for each core
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
    synkhronos.close()  # they leave that to their end
    print(f"done: {path}", flush=True)
