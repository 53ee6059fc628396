"""Playdoh's first example: two matrices, each inverted by a CPU of its own.

    python examples/playdoh/inverses.py

The program is the one of its documentation; only the check at the end is new.
"""

# For Windows users, it is required that any code using this library is placed after
# this line, otherwise the system will crash !
if __name__ == "__main__":
    from numpy import allclose, eye
    from numpy.linalg import inv

    # Import the library to have access to the ``distribute`` function
    from playdoh import *

    # We define the two matrices that are going to be inversed in parallel.
    A = 2 * eye(3, 3)
    B = 3 * eye(3, 3)

    # At most two CPUs. This has no effect if there are fewer.
    distinv = distribute(inv, max_cpu=2)

    # The list can be of any size: if there are more arguments than workers, each worker will
    # process several arguments in series.
    invA, invB = distinv([A, B])

    assert allclose(A @ invA, eye(3, 3)), invA
    assert allclose(B @ invB, eye(3, 3)), invB
    print(f"2 matrices, inverted: {invA[0, 0]:.3f} and {invB[0, 0]:.3f} on their diagonals")
