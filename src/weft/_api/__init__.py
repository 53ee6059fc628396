"""What you call, in reading order:

session.py      init, shutdown, rank, size, barrier: this process's place in a group
collectives.py  broadcast, scatter, gather, reduce and their like, in the default group
sharing.py      share: an array in memory that several processes see
tables.py       ArrayTable, MatrixTable, load, save_all
models.py       ModelTable: a model's parameters as a table
mapping.py      map, map_async: one function, many items
streaming.py    imap: results one by one, of items without end
distributing.py distribute: a function over lists and matrices
team.py         Team: a driver and workers that stay
checking.py     when a function's mode, or a loss, is checked on a few rows
functions.py    function: one call over split rows
replicas.py     replicate, same: an object with a copy in each rank
training.py     train_step: one step of training over split rows

Each asks `engines/registry.py` for an engine and talks to the contracts of `engines/base.py`.
"""
