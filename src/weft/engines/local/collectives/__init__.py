"""Arrays between the ranks of a group. In reading order:

collective.py   one collective, from its headers to its result, and the choice of the data path
transport.py    the data paths: slots, and peers' own memory
carry_out.py    carrying out a combination or a movement over these paths
pipelined.py    large sums and broadcasts, in chunks, by kernels in C
device.py       arrays on a device: its slots, and the choice between them and the host
persistent.py   an all_reduce of small arrays like the last one

What is decided, checked and computed is in `_core`. It imports `processes`, `memory`, `meeting`.
"""
