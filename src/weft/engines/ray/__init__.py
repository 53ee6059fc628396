"""Pools over hosts: Ray between them, weft's own workers and shared memory inside each.

engine.py    what the registry names
token.py     by what machines of one user know each other
rpc.py       one call of Ray's interface, in milliseconds
node.py      a node of Ray on this machine, and the process that watches over it
checks.py    what is wrong with machines, before anything is run: decided by pure functions
cluster.py   machines reached, all at once, and this process's connection to their cluster
opening.py   `weft open --port`, `--join` and `weft close`; a node for this process alone
status.py    `weft status`: the machines, what is free, and the maps that run

Of a map, in the order of a call:

pool.py      the pool, and one map, shared among hosts
placement.py how many workers each host has, and whether they have GPUs: decided by pure functions
actors.py    the actors of this process, and the threads that ask whether they live
messages.py  what driver and actors send to each other
wire.py      values and exceptions as they travel
modules.py   the user's modules on their way to hosts that do not have them
arrays.py    arrays that many calls use, once on each host
host.py      a host's part: an actor, and weft's own pool in it
"""
