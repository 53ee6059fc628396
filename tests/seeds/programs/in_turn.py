"""Runs programs one after the other, each as its own main program: in_turn.py first.py second.py"""

import runpy
import sys

for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
    print(f"done: {path}", flush=True)
