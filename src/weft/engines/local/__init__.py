"""Processes of this machine over shared memory, in reading order:

libc.py        the few system calls that Python does not offer
segment.py     memory that several processes see
recorder.py    what each rank is doing, for whoever asks why
roster.py      who is in the job, alive or not
waiting.py     the memory model; counters; sleeping until one is reached
locks.py       locks that survive their holder
channel.py     messages and descriptors between processes of one user
rendezvous.py  how ranks find each other
group.py       the group
arena.py       blocks of segments, recycled
keeper.py      blocks that other processes attach
launcher.py    `weft run`
"""
