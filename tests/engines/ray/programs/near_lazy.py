"""A module that is imported in a function only, and imports another."""

from near_package import deeper


def shifted(x):
    return x + deeper.SHIFT
