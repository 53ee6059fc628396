"""`weft doctor`: the machine as weft sees it, and in words what would go wrong on it.

machine.py   what is known: facts, each with its reason
look.py      how they are gathered
programs.py  those that other programs tell: nvidia-smi, mpirun, two ranks
reading.py   whether one process may read another's memory
trial.py     what those two ranks do
problems.py  what follows from the facts; pure
printing.py  facts and problems as text or JSON

A probe that fails is a fact as well: unknown, and why.
"""

from __future__ import annotations

import contextlib


def report(*, as_json: bool) -> int:
    """Print facts and problems; 0 if weft can run ranks on this machine, else 1."""
    from weft.doctor import printing
    from weft.doctor.look import look
    from weft.doctor.problems import obstacles

    machine = look()
    with contextlib.suppress(BrokenPipeError):  # as in `weft doctor | head -3`
        print(printing.as_json(machine) if as_json else printing.as_text(machine))
    return 1 if obstacles(machine) else 0
