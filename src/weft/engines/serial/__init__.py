"""This process alone: the reference for every other engine, and the debugger's friend.

group.py        a group of one, and its collectives
store.py        a table's rows
pool.py         both kinds of team, without workers
sharing.py      arrays that are shared with nobody
engine.py       what the registry's row names
"""
