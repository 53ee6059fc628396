"""Where it runs. Engines are found by name and imported when asked for. In reading order:

base.py         the contracts: Group, Store, Pool, Team
registry.py     which engines there are, what they offer, and which one a call gets
launched.py     where a launcher put this process
refusals.py     what every engine says of what cannot be used or allocated
interruption.py threads that start whole, exceptions of signal handlers, a computation that is ended
background.py   the thread behind async calls

The folder serial/ has this process alone, the reference for every other engine; local/ has
processes of this machine over shared memory, the engine by default.
"""
