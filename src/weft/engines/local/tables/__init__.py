"""A table's rows in shared memory. In reading order:

store.py        get and add: the docstring is the algorithm
state.py        the memory of a table; clocks, writes that were begun, staged deltas

What an add does to rows is in `_core/updaters.py`. It imports `processes`, `memory`, `meeting`.
"""
