"""What two ranks do so that `weft doctor` knows that ranks work here: meet, and share an array."""

from __future__ import annotations

import numpy

import weft


def main() -> None:
    """Everything that a program needs of the ground; raises what goes wrong."""
    weft.init()
    weft.share(numpy.zeros(1))
    weft.barrier()
    weft.shutdown()


if __name__ == "__main__":
    main()
