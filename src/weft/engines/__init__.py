"""Where it runs. Engines are found by name and imported at their first use. In reading order:

base.py         the contracts: Group, Store, Pool, Team
registry.py     the table of engines, and the choice of one for a call
launched.py     this process's place among those that a launcher started
key.py          the user's key, which opens named pipes and clusters
refusals.py     errors and checks that all engines share
interruption.py computations that a failure elsewhere interrupts; threads and signal handlers
turns.py        threads that use one team after the other
generators.py   the random generators of a process, and their seeds in a team
background.py   the thread that carries out asynchronous calls

serial/ runs in this process alone, and is the reference for every other engine; local/ runs in
processes of this machine over shared memory, and is the default. mpi/ has groups over hosts, ray/
pools over hosts.
"""
