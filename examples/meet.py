"""Ranks that meet: run it with `weft run -n 2 examples/meet.py`, or alone with python."""

import time

import weft

group = weft.init()
print(f"I am rank {weft.rank()} of {weft.size()}")

STEPS = 20_000
weft.barrier()
began = time.perf_counter()
for _ in range(STEPS):
    weft.barrier()
seconds = time.perf_counter() - began

if weft.is_master():
    print(f"{STEPS:,} barriers took {seconds:.2f} s: {seconds / STEPS * 1e6:.1f} us each")
weft.shutdown()
