"""A module that only the driver's host has."""

import near_package

RATE = 2


class Reading:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is type(self) and other.value == self.value

    __hash__ = None


class Broken(Exception):
    def __init__(self, code, *, detail):
        super().__init__(code)
        self.code, self.detail = code, detail


def rated(x):
    return x * RATE


def with_lazy(x):
    import near_lazy

    return near_lazy.shifted(x)


def by_text(x):
    import importlib

    return importlib.import_module("near_" + "hidden").double(x)


def broken(x):
    raise Broken(x, detail=near_package.DETAIL)
