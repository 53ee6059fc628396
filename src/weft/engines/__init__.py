"""Where it runs. Engines are found by name and imported when asked for. In reading order:

base.py         the contracts: Group, Store, Pool, Team
launched.py     where a launcher put this process
refusals.py     what every engine says of what cannot be used
memory.py       whether there is memory for what is about to be made
threads.py      threads that start whole or not at all
interrupts.py   exceptions that signal handlers raise
background.py   the thread behind async calls

This process alone, the reference for every other engine:

serial.py       the group
serial_collectives.py   its collectives
serial_store.py a table's rows
serial_team.py  both kinds of team

The folder local/ has processes of this machine over shared memory, the engine by default.
"""
