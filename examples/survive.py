"""One rank is killed; the others are told and go on without it.

weft run -n 3 --keep-going examples/survive.py
"""

import os
import signal

import weft

group = weft.init()
group.barrier()

if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out

try:
    group.barrier()
except weft.PeerLost as error:
    if group.rank == 0:
        print(f"{type(error).__name__}: {error}")
    group = group.survivors()

for _ in range(1000):
    group.barrier()
print(f"rank {group.rank} of {group.size} survivors went on, generation {group.generation}")
