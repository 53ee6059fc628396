"""A module beside playdoh_releases.py, which its function needs."""


def external_fun(x):
    return x + 1
