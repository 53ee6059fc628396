"""What the operating system offers a process, and what weft adds. In reading order:

linux.py        system calls that Python lacks; how a process ended; OS errors as weft's
cuda.py         whether a process has initialised CUDA, which its children could not use then
mps.py          a daemon of NVIDIA's MPS, which ends with the process that wanted it
channel.py      Unix sockets that carry JSON messages and file descriptors
output.py       printed lines and log records, relayed to the launcher or the driver

The lowest of the local engine's packages: it imports none of the others.
"""
