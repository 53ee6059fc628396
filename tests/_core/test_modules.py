"""Digests of modules: equal for equal contents, in every process, and cheap to look at again."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support import run_python
from weft._core.digest import digest
from weft._core.modules import ModuleWatcher, read_module
from weft._core.own_modules import imports_of, mentioned_in, own_modules, references

ZOO = """
from __future__ import annotations
import abc, array, collections, contextlib, dataclasses, datetime, decimal, enum, functools
import pathlib, re, threading, typing
import numpy as np

NUMBERS = 1, 2.5, -0.0, 1j, True, None, ..., 10 ** 5000, float("nan"), range(3), slice(1, 2)
WORDS = {"b", "a", "c", "ä"}
FROZEN = frozenset(WORDS)
NESTED = {"list": [1, {"deep": (b"bytes", bytearray(b"x"))}], "set": {1, 2}}
QUEUE = collections.deque([1])
ORDERED = collections.OrderedDict(a=1)
DEFAULT = collections.defaultdict(list, a=[1])
COUNTED = collections.Counter("abca")
ARRAY = np.arange(12.0).reshape(3, 4).T
STRUCT = np.zeros(2, [("a", "i4"), ("b", "f8")])
TIMES = np.array(["2020-01-01"], "datetime64[D]")
SCALAR = np.float32(1.5)
WHEN = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
EXACT = decimal.Decimal("1.10")
PATH = pathlib.Path("a") / "a" / "b"
PATTERN = re.compile("a+", re.I)
LOCK = threading.Lock()
T = typing.TypeVar("T")

class Color(enum.Enum):
    RED = 1
    GREEN = "two"

    def shout(self):
        return self.name

Point = collections.namedtuple("Point", "x y")
ORIGIN = Point(0, 0)
CHOSEN = Color.RED

class Base(abc.ABC):
    @abc.abstractmethod
    def f(self): ...

class Slots:
    __slots__ = ("a", "b")

@dataclasses.dataclass
class Config(Base):
    rate: float = 0.1
    names: list[str] = dataclasses.field(default_factory=list)

    def f(self):
        return super().f() or {"a", "b"}

    @property
    def half(self): return self.rate / 2

    @classmethod
    def make(cls): return cls()

    @staticmethod
    def nothing(): ...

    @functools.cached_property
    def cached(self): return 1

CONFIG = Config()
CONFIG.itself = CONFIG

def decorate(times):
    def wrap(function):
        @functools.wraps(function)
        def inner(*args, key=lambda x: x in {"p", "q", "r"}, **kwargs):
            return [function(*args, **kwargs) for _ in range(times)]
        return inner
    return wrap

@decorate(3)
def decorated(x, y=[1, 2], *, z={"a"}):
    def recursive(n):
        return n and recursive(n - 1)
    return recursive(x)

@functools.lru_cache(maxsize=3)
def cached(x):
    return x

@functools.singledispatch
def dispatching(x):
    return x

@dispatching.register
def _(x: str):
    return x + "!"

@contextlib.contextmanager
def managed(x):
    yield x

class Scaled:  # a decorator with a state of its own, and an attribute that arrays have, too
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.flags = 0

    def __call__(self, x):
        return self.__wrapped__(x) + self.flags

@Scaled
def scaled(x):
    return x

class Tokens:  # an iterator with a state of its own
    position = 0

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration

TOKENS = Tokens()
ARRAYS = [np.zeros((2, 3))]
BUFFERS = {"a": array.array("i", [0])}
PARTIAL = functools.partial(decorated, 1, z=2)
METHOD = CONFIG.f
BUILTIN = abs
REGISTRY = {"f": decorated, "class": Config}
DTYPE = np.dtype("f4")
"""


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module with everything, in a folder of the user's."""
    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    yield importlib.import_module("zoo")
    del sys.modules["zoo"]


def test_equal_contents_have_equal_digests_in_all_processes(zoo: ModuleType) -> None:
    """Whatever the order of sets, the identities of strings, and what has been run before."""
    program = """
import sys, weft
from weft._core.modules import read_module
if sys.argv[1] == "run":
    import zoo
    zoo.decorated(3), zoo.cached(2), zoo.Config.make().half, "".join(["R", "E", "D"])
    [zoo.Color.shout(zoo.Color.RED) for _ in range(100)]
    import pickle
    pickle.dumps(zoo.CONFIG)
import zoo
print({name: one.hex() for name, one in sorted(read_module(zoo, {}).items())})
"""
    seen = {
        run_python(program, how, env={"PYTHONHASHSEED": seed}).out
        for how, seed in (("run", "1"), ("run", "2"), ("-", "3"))
    }
    assert len(seen) == 1, seen
    here = {name: one.hex() for name, one in sorted(read_module(zoo, {}).items())}
    (found,) = map(ast.literal_eval, seen)
    assert found == here


@pytest.mark.parametrize(
    "change",
    [
        "zoo.NUMBERS = 1, 2.5, 0.0, *zoo.NUMBERS[3:]",
        "zoo.NUMBERS = True, *zoo.NUMBERS[1:]",
        "zoo.WORDS.add('d')",
        "zoo.NESTED['list'][1]['deep'][1][0] = 7",
        "zoo.NESTED['set'].add(3)",
        "zoo.QUEUE.append(2)",
        "zoo.ORDERED['b'] = 2",
        "zoo.DEFAULT['a'].append(2)",
        "zoo.ARRAY[2, 1] = 99",
        "zoo.TIMES.shape = (1, 1)",
        "zoo.STRUCT['a'][1] = 1",
        "zoo.SCALAR = zoo.np.float64(1.5)",
        "zoo.PATH /= 'c'",
        "zoo.CONFIG.rate = 0.2",
        "zoo.CONFIG.names.append('a')",
        "zoo.Config.f = lambda self: 1",
        "zoo.Config.half.fget.__code__ = zoo.Base.f.__code__",
        "del zoo.Config.make",
        "zoo.Config.extra = 1",
        "zoo.Config.nothing = staticmethod(lambda: 1)",
        "zoo.Base.f = lambda self: 2",
        "zoo.decorated.__wrapped__.__code__ = zoo.cached.__wrapped__.__code__",
        "zoo.decorated.__wrapped__.__defaults__[0].append(3)",
        "zoo.decorated.__closure__[1].cell_contents = 4",
        "zoo.decorated.note = 1",
        "zoo.cached = zoo.functools.lru_cache(lambda x: x + 1)",
        "zoo.PARTIAL = zoo.functools.partial(zoo.decorated, 2)",
        "zoo.BUILTIN = len",
        "zoo.CHOSEN = zoo.Color.GREEN",
        "zoo.LOCK = zoo.threading.Lock()",
        "zoo.REGISTRY['g'] = zoo.cached",
        "zoo.dispatching.register(int, abs)",
        "zoo.managed.__wrapped__.__code__ = (lambda x: (yield x + 1)).__code__",
        "zoo.scaled.flags = 1",
        "zoo.TOKENS.position = 1",
        "zoo.ARRAYS[0] = zoo.ARRAYS[0].reshape(3, 2)",
        "zoo.ARRAYS[0] = zoo.ARRAYS[0].view('i8')",
        "zoo.ARRAYS[0] = zoo.np.asfortranarray(zoo.ARRAYS[0])",
        "zoo.BUFFERS['a'] = zoo.array.array('f', [0])",
        "zoo.NEW = 1",
        "del zoo.WORDS",
    ],
)
def test_every_change_is_seen(zoo: ModuleType, change: str) -> None:
    """By `look`, which compares identities first; and nothing else is seen as changed again."""
    watcher = ModuleWatcher()
    before = watcher.look(["zoo"])["zoo"]
    assert watcher.look(["zoo"])["zoo"].digests is before.digests
    exec(change, {"zoo": zoo})
    after = watcher.look(["zoo"])["zoo"]
    assert after.digests is not before.digests
    assert after.changes_since(before) or before.digests.keys() - after.digests.keys()
    again = watcher.look(["zoo"])["zoo"]
    assert again.digests is after.digests
    assert watcher.look(["zoo"])["zoo"] is again  # now nothing has even been read again


def test_what_is_no_change(zoo: ModuleType) -> None:
    """The same contents, and what each process has of its own."""
    watcher = ModuleWatcher()
    before = watcher.look(["zoo"])["zoo"]
    with zoo.LOCK:
        zoo.cached(1)
        zoo.CONFIG.rate = 0.1
        zoo.NUMBERS = (*zoo.NUMBERS,)
    after = watcher.look(["zoo"])["zoo"]
    assert after.digests is before.digests
    assert after.values["NUMBERS"] is not before.values["NUMBERS"]


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock,
        lambda: iter([]),
        lambda: [threading.Lock()],
        object,
    ],
)
def test_what_is_not_compared(zoo: ModuleType, make: Callable[[], Any]) -> None:
    """Of these only the type counts."""
    assert digest(make()) == digest(make())
    vars(zoo)["NEW"] = make()
    seen = ModuleWatcher().look(["zoo"])["zoo"]
    assert seen.is_opaque("NEW")
    assert seen.is_opaque("LOCK")
    assert not seen.is_opaque("NESTED")


class Interrupting:
    """A value that raises an error while it is read, once."""

    def __init__(self, error: BaseException) -> None:
        self._errors = [error]

    def __reduce_ex__(self, _: Any) -> Any:
        if self._errors:
            raise self._errors.pop()
        return Interrupting, (None,)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError()], ids=repr)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_look_that_is_interrupted(zoo: ModuleType, error: BaseException, first: bool) -> None:
    """The next one sees all that this one would have seen, also what only got another object."""
    watcher = ModuleWatcher(lambda other: other is error)
    before = None if first else watcher.look(["zoo"])["zoo"]
    zoo.LOCK, zoo.SCALAR, zoo.NEW = threading.Lock(), 7, Interrupting(error)
    with pytest.raises(type(error)):
        watcher.look(["zoo"])
    after = watcher.look(["zoo"])["zoo"]
    assert after.contents == read_module(zoo, after.contents)
    if before is not None:
        assert sorted(after.changes_since(before)) == ["LOCK", "NEW", "SCALAR"]


def test_an_error_of_a_value_is_no_interrupt(zoo: ModuleType) -> None:
    """It cannot be compared, and all else can."""
    zoo.NEW = Interrupting(TimeoutError())
    seen = ModuleWatcher().look(["zoo"])["zoo"]
    assert seen.is_opaque("NEW")
    assert not seen.is_opaque("NESTED")


def test_data_that_changes_while_it_is_read(zoo: ModuleType) -> None:
    """By another thread: it is read again at the next look, and compared from then on."""

    class Growing(dict[str, int]):
        def __reduce__(self) -> Any:
            if len(self) == 1:
                for _ in self:
                    self["other"] = 1  # the iteration raises RuntimeError
            return dict, (), None, None, iter(self.items())

    vars(zoo)["NEW"] = new = Growing(a=1)
    watcher = ModuleWatcher()
    assert watcher.look(["zoo"])["zoo"].is_opaque("NEW")
    before = watcher.look(["zoo"])["zoo"]
    assert not before.is_opaque("NEW")
    new["a"] = 2
    assert watcher.look(["zoo"])["zoo"].changes_since(before) == ["NEW"]


def test_which_modules_are_the_users(zoo: ModuleType) -> None:
    """Neither the standard library's, nor installed ones, nor weft's, nor the main program."""
    own = own_modules()
    assert "zoo" in own
    assert __name__ in own
    assert not {"os", "numpy", "pytest", "weft", "weft.errors", "__main__"} & own.keys()


def test_what_a_module_mentions(tmp_path: Path, zoo: ModuleType) -> None:
    """Modules, functions and classes of other modules, and what functions import when called."""
    texts = {
        "users_a": "import users_b\nfrom users_c import f\n\ndef g():\n    import users_d",
        "users_b": "",
        "users_c": "def f(): pass",
        "users_d": "",
        "users_e": "",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    for name in texts:
        importlib.import_module(name)
    try:
        assert sorted(ModuleWatcher().look(["users_a"])) == [
            "users_a",
            "users_b",
            "users_c",
            "users_d",
        ]
    finally:
        for name in texts:
            del sys.modules[name]


def test_imports_within_functions() -> None:
    """Absolute and relative ones."""
    lines = ["import a.b", "from c import d", "from . import e", "from .g import h"]
    text = "def f():\n " + "\n ".join([*lines, "from ..i import j"])
    space: dict[str, Any] = {}
    exec(text, space)
    found = imports_of(space["f"].__code__, "pack.age")
    assert {"a.b", "c", "c.d", "pack.age.e", "pack.age.g", "pack.age.g.h", "pack.i"} <= found


def test_references_of_pickles(zoo: ModuleType) -> None:
    """By pickle's own pickler, and by cloudpickle's."""
    import pickle

    assert "zoo" in mentioned_in(pickle.dumps([zoo.CHOSEN], 5))
    assert mentioned_in(pickle.dumps([1, "zoo"], 5)) == []
    for value in (zoo.Config, zoo, zoo.decorated, zoo.cached, zoo.dispatching, zoo.managed):
        assert list(references(value)) == ["zoo"]
    assert list(references(lambda: zoo.CONFIG)) == []
