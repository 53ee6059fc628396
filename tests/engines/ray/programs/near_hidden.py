"""A module whose name no code has."""


def double(x):
    return 2 * x
