"""What you call, in reading order:

session.py      init, shutdown, rank, size, barrier: this process's place in a group
sharing.py      share: an array in memory that several processes see
collectives.py  what the ranks of the default group do together

Of tables:

tables.py       ArrayTable, MatrixTable
models.py       ModelTable: a model's parameters as a table
saving.py       load, save_all: tables on disk

Of map:

progress.py     the bar
teams.py        which team does the work, and what all its workers see
maps.py         one map, from its options to its results
mapping.py      map, map_async
distributing.py distribute

Of functions:

team.py         Team: a driver and workers that stay
functions.py    function: one call over split rows
replicas.py     replicate, same: an object with a copy in each rank
training.py     train_step
"""
