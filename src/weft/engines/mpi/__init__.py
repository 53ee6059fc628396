"""Groups over hosts: shared memory inside each host, MPI between them.

engine.py        what the registry names
launcher.py      `weft run --hosts`
survey.py        what the hosts of a launch have: Python, packages, names
programs.py      the mpirun of this environment, and the MPI library that mpi4py uses
"""
