"""This process alone: the reference for every other engine, and the one to debug with.

engine.py       what the registry's row names
group.py        a group of one, and its collectives
store.py        a table's rows
pool.py         a pool and a team without workers
sharing.py      shared arrays in ordinary memory
"""
