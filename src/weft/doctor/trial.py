"""What two ranks do so that `weft doctor` knows that ranks work here: meet, share and add."""

from __future__ import annotations

import numpy

import weft


def main() -> None:
    """Everything that a program needs of the engine; raises what goes wrong."""
    group = weft.init()
    weft.share(numpy.zeros(1))
    weft.barrier()
    total = weft.all_reduce(numpy.ones(1))
    if total[0] != group.size:
        raise ArithmeticError(f"the sum of {group.size} ones came out as {total[0]}")
    weft.shutdown()


if __name__ == "__main__":
    main()
