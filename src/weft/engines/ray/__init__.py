"""Pools over hosts: Ray between them, weft's own workers and shared memory inside each.

engine.py    what the registry names
token.py     by what machines of one user know each other
rpc.py       one call of Ray's interface, in milliseconds
node.py      a node of Ray on this machine, and the process that watches over it
checks.py    what is wrong with machines, before anything is run: decided by pure functions
cluster.py   machines reached, all at once, and this process's connection to their cluster
opening.py   `weft open --port`, `--join` and `weft close`; a node for this process alone
status.py    `weft status`: the machines, what is free, and the maps that run
"""
