"""What a call passes through: functions of values, without processes, sockets or shared memory.

In reading order:

arguments.py    whole numbers, timeouts and names of arguments, as users give them
launch.py       rank and size, from the launcher's variables
hosts.py        the hosts of a launch, as users write them
mpirun.py       what differs between mpiruns: options, marks of lines, messages
survey.py       what hosts have, as a table, and what follows
ray_versions.py which versions of Ray can be used
seeding.py      random seeds from (seed, index)
failures.py     exceptions between processes; the unpicklable part of a value; the user's line

Of collectives:

arithmetic.py   dtypes; combining, adding and copying arrays
arrays.py       the arrays of a call, and where its results go
shared.py       the type that `share` returns
partition.py    which rows or columns are whose
calls.py        a collective before and after the ranks met; reduce and all_reduce
moves.py        broadcast, scatter, gather and all_gather

Of tables:

updaters.py     what `add` does: built-in rules, or a user's function
tables.py       what a table is, what may be given to it, and which rank waits for which
rows.py         some rows of a table, read and updated
device_rows.py  the same for rows on a device
model_values.py a model's values, on the host or on a device
sharding.py     which host has which rows, what is sent to whom, and when
checkpoint.py   a table as a safetensors file

Of map and functions:

items.py        a job and its results; how a function is called with an item
drawn.py        items that their iterator may still change
schedule.py     which chunk is sent next
shares.py       which host runs which items
own_modules.py  which modules are the user's, and which of them code refers to
modules.py      whether these are the same in driver and worker
digest.py       a digest of a value, equal in all processes
pickling.py     classes and cached functions of the script, by value
fingerprint.py  whether what a function uses has changed
functions.py    a function on a rank's rows, and the outputs of all ranks joined
checks.py       whether they are joined rightly: the whole beside its parts, on a few rows
"""
