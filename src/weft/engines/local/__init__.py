"""Processes of this machine over shared memory, in reading order:

engine.py       what the registry's row names: everything from outside comes in here
probes.py       what `weft doctor` tries of this machine
libc.py         the few system calls that Python does not offer
translation.py  the system's errors, as weft's
segment.py      memory that several processes see, and blocks of it
processes.py    who a process is, and how it ended
polling.py      looking whether a descriptor has something to read
recorder.py     what each rank is doing, for whoever asks why
roster.py       who is in the job, and whether they live
waiting.py      the memory model; counters; sleeping until one is reached
locks.py        locks that survive their holder
meeting_memory.py  the counters and mailboxes that ranks meet at
meeting.py      where the ranks of a group meet
channel.py      messages and descriptors between processes of one user
rendezvous.py   how ranks find each other
arena.py        which parts of which segments are free
views.py        which blocks this process sees
references.py   what stands for a block in another process
keeper_sockets.py  where others ask for blocks
keeper.py       the blocks that it made
attachments.py  the blocks that it got from others
blocks.py       all of these as one: allocate, refer, attach
shared_arrays.py   arrays in blocks, and their pickles
common_memory.py   memory that one rank makes and all see
slots.py        memory through which small arrays pass
direct.py       copies out of and into a peer's own memory
first_message.py   what a rank says at the first step of a collective
mapped.py       peers' arrays that lie in shared memory
joint_memory.py    what all ranks work in together: large sums and broadcasts
transport.py    a rank's ways to the others: all of these as one
combining.py    carrying out what is to be combined
moving.py       carrying out what is to be moved
prepared.py     the quick way for small arrays that were reduced before
collectives.py  a collective, from the first step to the last
table_memory.py where everything of a table lies
clocks.py       how many adds each rank has made, and waiting for the others
changes.py      who is changing which rows, and what a death leaves
staging.py      the deltas of bsp, and how they are applied
store.py        a table's rows: reading and adding
group.py        the group
output.py       what ranks and workers print
launcher.py     `weft run`

Of map, in reading order:

large_arrays.py    arrays that are part of items and results
wire.py         functions, items and results as bytes
frames.py       whole messages over a stream
logs.py         what workers log
worker.py       a worker: receive, run, reply
fork_server.py  the process that starts workers
interpreter.py  its interpreter, started early
remote_worker.py   a worker, as its driver sees it
watching.py     waiting for several workers at once
limits.py       how long a map may take, and whether it is still wanted
feeding.py      items that a thread of their own draws
losses.py       what there is to say of a worker that was lost
workers.py      the workers of this process, kept warm
running.py      a job, from the first chunk to the last
team.py         a driver and its workers
named.py        workers behind a named pipe

Of functions, in reading order:

member.py       a process's part in a team, and what is registered there
guard.py        the driver's own part of a call, ended when a worker fails
rounds.py       one remote function in the workers' hands
standing.py     a team: calls, from the first message to the last
"""
