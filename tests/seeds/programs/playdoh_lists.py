"""Seed 004, example 1: each of two matrices is inverted by a worker of its own."""

# For Windows users, it is required that any code using this library is placed after
# this line, otherwise the system will crash !
if __name__ == "__main__":
    from numpy import eye
    from numpy.linalg import inv

    # Import the library to have access to the ``distribute`` function
    from playdoh import *

    # We define the two matrices that are going to be inversed in parallel.
    A = 2 * eye(3, 3)
    B = 3 * eye(3, 3)

    # The first argument of ``distribute`` is the name of the function
    # that is being parallelized. The optional argument ``max_cpu=n`` limits the number of CPUs.
    distinv = distribute(inv, max_cpu=2)

    # ``distinv`` is called by passing a list of arguments.
    invA, invB = distinv([A, B])

    assert (invA == inv(A)).all()
    assert (invB == inv(B)).all()
    print(invA[0, 0], invB[0, 0])
