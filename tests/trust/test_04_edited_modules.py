"""Edited modules: workers compute with the code and the constants that the driver has now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import weft
from tests.support import Outcome, run_script

#: modules are edited within a second: bytecode files could not tell the versions apart
WITHOUT_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}

MODULES = {
    "helper.py": """
RATE = 1

def g(x):
    return x * RATE
""",
    "mod.py": """
import helper
from helper import g

OPTIONS = {"add": 0}

class Scale:
    by = 1

    def __call__(self, x):
        return x * self.by

def f(x):
    return helper.g(x), g(x), Scale()(x) + OPTIONS["add"]

def total(x):
    return helper.g(x).sum()

def lazy(x):
    import late
    return late.h(x)
""",
    "late.py": "def h(x):\n    return x + 1\n",
}

START = """
import importlib, os, sys
from pathlib import Path
import weft
import helper, mod

def edit(name, old, new):
    text = Path(name).read_text()
    assert old in text
    Path(name).write_text(text.replace(old, new))

def check(f=mod.f, n=2):
    items = range(1, 5)
    expected = [f(x) for x in items]
    found = weft.map(f, items, n=n)
    assert found == expected, (found, expected)
    return expected[0]

assert check() == (1, 1, 1)
"""


def run(program: str) -> Outcome:
    """Run a program beside its modules."""
    folder = Path(os.environ["WEFT_TEST_FOLDER"])
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    start = f"import os; os.chdir({str(folder)!r})\n"
    return run_script(start + program, env=WITHOUT_BYTECODE)


def succeeds(program: str) -> None:
    outcome = run(program + "\nprint('done')")
    assert outcome.code == 0, outcome
    assert outcome.out.endswith("done\n"), outcome


def test_a_module_that_is_reloaded() -> None:
    """Its functions, its classes, its constants; what others have imported from it stays."""
    succeeds(
        START
        + """
edit("mod.py", "by = 1", "by = 10")
edit("mod.py", '"add": 0', '"add": 5')
importlib.reload(mod)
assert check(mod.f) == (1, 1, 15)
edit("mod.py", "helper.g(x), g(x)", "g(x), -helper.g(x)")
old = mod.f
importlib.reload(mod)
assert check(mod.f) == (1, -1, 15)
assert check(old) == (1, 1, 15)  # whoever kept the old one has the old one
"""
    )


def test_a_helper_that_is_reloaded() -> None:
    """A module that the function's module imports, `import helper` and `from helper import g`."""
    succeeds(
        START
        + """
edit("helper.py", "x * RATE", "x * RATE + 100")
importlib.reload(helper)
assert check() == (101, 1, 1)  # mod.g is the old one, here as in the workers
importlib.reload(mod)
assert check(mod.f) == (101, 101, 1)
"""
    )


def test_a_function_of_a_team_after_a_reload() -> None:
    """No mixture of both in one result: every rank computes what the driver computes."""
    succeeds(
        START
        + """
import numpy as np

def rows(x):
    return helper.g(x)

x = np.ones(4)
with weft.Team(2) as team:
    f = weft.function(rows, collect="gather", team=team)
    g = weft.function(mod.total, collect="sum", team=team)
    assert list(f(x)) == [1] * 4 and g(x) == 4
    edit("helper.py", "x * RATE", "x * RATE + 6")
    importlib.reload(helper)
    assert list(f(x)) == [7] * 4 and g(x) == 28
    helper.RATE = 3
    assert list(f(x)) == [9] * 4 and g(x) == 36 == mod.total(x)
    edit("mod.py", "helper.g(x).sum()", "helper.g(x).sum() * 2")
    importlib.reload(mod)
    assert g(x) == 36 == g.serial(x)  # made of the old function
    h = weft.function(mod.total, collect="sum", team=team)
    assert h(x) == 72 == mod.total(x)
"""
    )


def test_attributes_that_are_patched() -> None:
    """By hand or by monkeypatch, before the first map and undone after it; deleted; in place."""
    succeeds(
        START.replace("assert check() == (1, 1, 1)", "")
        + """
import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(helper, "g", lambda x: -x)
    patch.setattr(mod.Scale, "by", 3)
    patch.setitem(mod.OPTIONS, "add", 1)
    assert check() == (-1, 1, 4)
assert check() == (1, 1, 1)

helper.RATE = 0.5
assert check() == (0.5, 0.5, 1)
mod.OPTIONS["add"] = 7
assert check() == (0.5, 0.5, 8)
mod.OPTIONS = {"add": 8}
assert check() == (0.5, 0.5, 9)
mod.Scale.__call__ = lambda self, x: x * 100
assert check() == (0.5, 0.5, 108)
mod.g = helper.g = abs
assert check() == (1, 1, 108)
helper.g.__self__  # abs is a function in C

del mod.OPTIONS
found = weft.map(mod.f, [1], n=2, on_error="return")
assert isinstance(found[0], NameError), found
"""
    )


def test_a_file_that_is_edited_and_not_reloaded() -> None:
    """The driver has the old code, and so have the workers, also those that start later."""
    succeeds(
        START
        + """
edit("helper.py", "x * RATE", "x * RATE + 100")
edit("mod.py", "by = 1", "by = 10\\n    extra = 3")
Path("mod.py").write_text(Path("mod.py").read_text() + "\\nEXTRA = 1\\n")
assert check() == (1, 1, 1)
assert check(n=4) == (1, 1, 1)  # two of these are new
weft.shutdown()
assert check() == (1, 1, 1)
assert not any(weft.map(lambda _: hasattr(mod, "EXTRA"), range(4), n=2))
"""
    )


def test_a_module_that_a_function_imports_when_it_is_called() -> None:
    """It is compared as well, once the driver has it."""
    succeeds(
        START
        + """
assert check(mod.lazy) == 2
edit("late.py", "x + 1", "x + 100")
assert check(mod.lazy, n=3) == 2  # one of these is new
import late
importlib.reload(late)
assert check(mod.lazy) == 101
"""
    )


def test_a_package() -> None:
    """Its modules are compared where they are used, as `pack.part.f`, and by `from . import part`;
    others of it are not imported."""
    pack = Path(os.environ["WEFT_TEST_FOLDER"]) / "pack"
    pack.mkdir()
    (pack / "__init__.py").write_text("from . import inner\n\ndef f(x):\n    return inner.g(x)\n")
    (pack / "inner.py").write_text("def g(x):\n    return x\n")
    (pack / "part.py").write_text("def g(x):\n    return x\n")
    (pack / "unused.py").write_text("")
    (pack.parent / "user.py").write_text(
        "import pack.part\n\ndef f(x):\n    return pack.f(x), pack.part.g(x)\n"
    )
    succeeds(
        START
        + """
import user, pack.unused, pack.part

def of_main(x):
    return pack.part.g(x), "pack.unused" in sys.modules

assert check(user.f) == (1, 1)
assert weft.map(of_main, [1], n=2) == [(1, False)]
edit("pack/inner.py", "return x", "return x + 1")
edit("pack/part.py", "return x", "return x + 2")
assert check(user.f, n=3) == (1, 1)
importlib.reload(pack.inner), importlib.reload(pack.part)
assert check(user.f) == (2, 3)
assert weft.map(of_main, [1], n=2) == [(3, False)]
"""
    )


def test_items_of_a_class_that_has_changed() -> None:
    """The modules that items refer to count too."""
    succeeds(
        START
        + """
def call(scale):
    return scale(7)

assert weft.map(call, [mod.Scale()] * 2, n=2) == [7, 7]
mod.Scale.by = 3
assert weft.map(call, [mod.Scale()] * 2, n=2) == [21, 21]
"""
    )


def test_the_state_of_a_module_is_one() -> None:
    """What functions change of their module in a worker stays there, and locks stay its own; of
    instances of the user's classes the attributes are compared."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "state.py").write_text("""
import functools, threading

lock = threading.Lock()
calls = 0
seen = []

class Settings:
    def __init__(self):
        self.rate = 1

    @functools.cached_property  # has a lock until Python 3.12
    def double(self):
        return 2 * self.rate

settings = Settings()

@functools.lru_cache
def cached(x):
    return x * settings.rate

def count(x):
    global calls
    with lock:
        calls += 1
        seen.append(x)
    return calls, len(seen), settings.rate

def cached_rate(x):
    return cached(x)
""")
    succeeds(
        START
        + """
import state

weft.shutdown()  # from here on there is one worker
assert weft.map(state.count, range(3), n=1) == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]
assert weft.map(state.count, range(2), n=1) == [(4, 4, 1), (5, 5, 1)]
state.settings.rate = 3
assert weft.map(state.count, [0], n=1) == [(6, 6, 3)]
state.calls = 100
assert weft.map(state.count, [0], n=1) == [(101, 7, 3)]
assert state.calls == 100 and state.seen == []

assert weft.map(state.cached_rate, [5], n=1) == [15]
edit("state.py", "x * settings.rate", "x * settings.rate + 1")
importlib.reload(state)
assert weft.map(state.cached_rate, [5], n=1) == [6]

state.Settings.factor = 5
assert weft.map(lambda x: state.Settings().double * state.Settings.factor, [0], n=1) == [10]

import numpy as np
with weft.Team(2) as team:  # what the driver's part of a call changes is sent with the next one
    def tally(x):
        state.seen.append(len(x))
        return np.array([state.seen[-1], len(state.seen)])
    f = weft.function(tally, collect="sum", team=team, check=None)
    found = [list(f(np.ones(6))) for _ in range(3)]
    assert found == [[6, 2], [6, 4], [6, 6]], found
"""
    )


CACHES = """
import contextlib, functools

RATE = 1

def g(x):
    return x * RATE + 0

@functools.lru_cache
def remembered(x):
    return g(x)

def remember(function):
    found = {}
    def inner(x):
        if x not in found:
            found[x] = function(x)
        return found[x]
    return inner

@remember
def by_a_closure(x):
    return g(x)

def by_a_default(x, found={}):
    if x not in found:
        found[x] = g(x)
    return found[x]

def by_an_attribute(x):
    if not hasattr(by_an_attribute, "found"):
        by_an_attribute.found = g(1)
    return by_an_attribute.found

FOUND = None

def by_a_constant(x):
    global FOUND
    if FOUND is None:
        FOUND = g(1)
    return FOUND

def by_a_new_variable(x):
    global NEW
    try:
        return NEW
    except NameError:
        NEW = g(1)
        return NEW

class Model:
    found = {}
    rate = 1

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return True

    @functools.lru_cache
    def remembered(self, x):
        return g(x) * self.rate

    @functools.cached_property
    def once(self):
        return g(1)

    def by_a_class(self, x):
        if x not in Model.found:
            Model.found[x] = g(x) * self.rate
        return Model.found[x]

MODEL = Model()

def all_of_them(x):
    functions = (
        remembered, by_a_closure, by_a_default, by_an_attribute, by_a_constant, by_a_new_variable,
        MODEL.remembered, MODEL.by_a_class, lambda _: MODEL.once,
    )
    return [function(x) for function in functions]
"""


def test_what_workers_remember_of_old_code() -> None:
    """Caches of any kind are the driver's after a reload, which makes them anew; those of
    functools are cleared by any change, whether or not the driver has cleared its own."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "caches.py").write_text(CACHES)
    succeeds(
        START
        + """
import caches
assert weft.map(caches.all_of_them, [1, 1], n=2) == [[1] * 9] * 2
edit("caches.py", "x * RATE + 0", "x * RATE + 6")
importlib.reload(caches)
assert weft.map(caches.all_of_them, [1, 1], n=2) == [[7] * 9] * 2
caches.RATE = 2
assert weft.map(caches.remembered, [1, 1], n=2) == [8, 8]
caches.MODEL.rate = 3  # a worker has something in the cache of its class
assert weft.map(caches.MODEL.remembered, [1, 1], n=2) == [24, 24]
by_script = functools.lru_cache(lambda x: caches.g(x))
assert weft.map(by_script, [1, 1], n=2) == [8, 8]
caches.RATE = 3
assert weft.map(by_script, [1, 1], n=2) == [9, 9]
""".replace("import caches", "import caches, functools", 1)
    )


CALLABLES = """
import contextlib, functools, operator

def g(x):
    return x + 0

@functools.lru_cache
def cached(x):
    return x + 0

@functools.singledispatch
def dispatching(x):
    return 0

@dispatching.register
def _(x: int):
    return x + 0

@contextlib.contextmanager
def managed(x):
    yield x + 0

def manages(x):
    with managed(x) as found:
        return found

class Scaled:
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.by = 1

    def __call__(self, x):
        return self.__wrapped__(x) * self.by

@Scaled
def scaled(x):
    return x + 0

class Model:
    @functools.singledispatchmethod
    def dispatching(self, x):
        return x + 0

    def method(self, x):
        return x + 0

    again = functools.partialmethod(method)

PARTIAL = functools.partial(g)
TABLE = {"g": lambda x: x + 0}
MODEL = Model()
"""


@pytest.mark.parametrize(
    "callable",
    [
        *("cached", "dispatching", "manages", "scaled", "PARTIAL", "TABLE['g']"),
        *("MODEL.dispatching", "MODEL.again", "Model().method"),
    ],
)
def test_what_is_called_is_no_plain_function(callable: str) -> None:
    """Each alone in a program: nothing else has its module brought up to date."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "callables.py").write_text(CALLABLES)
    succeeds(
        START
        + """
import callables
assert weft.map(callables.NAME, [1, 2], n=2) == [1, 2]
edit("callables.py", "x + 0", "x + 6")
importlib.reload(callables)
assert weft.map(callables.NAME, [1, 2], n=2) == [7, 8]
if "NAME" == "scaled":
    callables.scaled.by = 2
    assert weft.map(callables.scaled, [1, 2], n=2) == [14, 16]
if "NAME" == "dispatching":
    callables.dispatching.register(int, lambda x: -x)
    assert weft.map(callables.dispatching, [1, 2], n=2) == [-1, -2]
    mine = functools.singledispatch(lambda x: 3)
    mine.register(str, lambda x: 4)
    assert weft.map(mine, [1, ""], n=2) == [3, 4]
""".replace("NAME", callable).replace("import callables", "import callables, functools", 1)
    )


def test_data_of_any_kind() -> None:
    """Whatever can be pickled, also where the driver has changed it before the first call; objects
    that hold one another stay what they are to each other."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "kinds.py").write_text("""
import array, collections, types
import numpy as np

class Counts(dict):
    pass

class Slots:
    __slots__ = ("value",)

class Locked:
    def __init__(self):
        import threading
        self.lock, self.value = threading.Lock(), 0
    def __getstate__(self):
        return {"value": self.value}

class Node:
    total = 0
    def __init__(self):
        self.value, self.others = 0, []
    @staticmethod
    def sum_of_all(x):
        return x + Node.total

class View(np.ndarray):
    pass

class Estimator:
    pass

Estimator.__module__ = "elsewhere"  # a class of an installed package

counts, slots, locked, estimator = Counts(a=0), Slots(), Locked(), types.SimpleNamespace(w=[0])
slots.value = 0
buffer = array.array("d", [0, 0])
mapping = collections.UserDict(a=0)
objects = np.array([0, [0]], dtype=object)
masked = np.ma.array([0.0, 1.0], mask=[0, 1])
records = np.rec.array([(0, 0.0)], names="a,b")
view = np.zeros(3).view(View)
nodes = [Node() for _ in range(20)]  # each knows all others
for node in nodes:
    node.others = [other for other in nodes if other is not node]
first = nodes[0]

def values(x):
    return [
        counts["a"], slots.value, locked.value, estimator.w[0], buffer[0], mapping["a"],
        objects[1][0], float(masked[0]), float(records.b[0]), float(view[0]), nodes[3].value,
        nodes[1].others[0] is nodes[0] is first, first.others[0].value,
    ]

def change(v):
    counts["a"] = slots.value = locked.value = estimator.w[0] = buffer[0] = mapping["a"] = v
    objects[1][0] = masked[0] = records.b[0] = view[0] = v
    for node in nodes:
        node.value = v
    Node.total = v
""")
    succeeds(
        START
        + """
import kinds
for value in (1, 2, 3):
    kinds.change(value)
    check(kinds.values)
    assert check(kinds.Node.sum_of_all) == 1 + value
"""
    )


def test_models_of_libraries() -> None:
    """A network and an estimator that a module holds are trained in the driver between calls."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "models.py").write_text("""
import numpy as np
import torch
from sklearn.linear_model import LinearRegression

net = torch.nn.Linear(1, 1)
line = LinearRegression()

def train(slope):
    line.fit([[0.0], [1.0]], [0.0, slope])
    with torch.no_grad():
        net.weight.fill_(slope), net.bias.fill_(0)

def predict(x):
    return float(line.predict([[x]])[0]), net(torch.tensor([float(x)])).item()
""")
    succeeds(
        START
        + """
import models
for slope in (2.0, 3.0, 4.0):
    models.train(slope)
    assert check(models.predict)[1] == slope
"""
    )


def test_data_that_cannot_be_sent() -> None:
    """Workers keep their own, and a warning says so once; an object of a library that cannot be
    compared, random generators, and containers of nothing else are each process's own without a
    word."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "held.py").write_text("""
import random, threading, weakref
import numpy as np

class Service:
    def __init__(self):
        self.lock, self.rate = threading.Lock(), 1

service = Service()
table = {"lock": threading.Lock(), "rate": 1}
event = threading.Event()
generators = np.random.default_rng(), random.Random()
held, by_name, nested = [], {}, [[]]

def rates(x):
    own = len(held), len(by_name), len(nested[0])
    return service.rate, table["rate"], event.is_set(), own
""")
    succeeds(
        START
        + """
import warnings, weakref
import held
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    check(held.rates)
    held.event.set(), [one.random() for one in held.generators]
    held.held.append(weakref.ref(held.service)), held.by_name.update(a=held.event)
    held.nested[0].append(held.event), held.nested.append(held.nested)
    check(lambda x: 1), weft.map(held.rates, [1, 2], n=2)
    assert not caught, caught[0].message
    for _ in range(3):
        held.service.rate += 1
        held.table["rate"] += 1
        found = weft.map(held.rates, [1, 2], n=2)
assert found == [(1, 1, False, (0, 0, 0))] * 2, found
told = sorted(str(one.message) for one in caught)
assert len(told) == 2 and "held.service" in told[0] and "held.table" in told[1], told
assert all("lock" in one and "argument" in one for one in told), told
assert {one.filename for one in caught} == {__file__}
"""
    )


@pytest.mark.parametrize("call", ["weft.map(held.rate, [1.0, 2.0], n=2)[-1]", "f(np.ones(2))[-1]"])
def test_that_warning_as_an_error(call: str) -> None:
    """It is raised in the driver, once for each attribute, and is no worker's failure: the next
    call has the workers."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "held.py").write_text("""
import threading

first = {"lock": threading.Lock(), "rate": 1}
second = {"lock": threading.Lock(), "rate": 1}

def rate(x):
    return x * 0 + first["rate"]
""")
    succeeds(
        START
        + f"""
import warnings
import numpy as np
import held
warnings.simplefilter("error")
held.first["rate"] = held.second["rate"] = 2
told = []
with weft.Team(2) as team:
    f = weft.function(held.rate, collect="gather", team=team, check=None)
    for _ in range(4):
        try:
            last = {call}
        except RuntimeWarning as error:
            assert error.__cause__ is None, error.__cause__
            told.append(str(error).partition(" ")[0])
assert last == 1
assert 1 <= len(told) == len(set(told)) and set(told) <= {{"held.first", "held.second"}}, told
"""
    )


def test_code_that_cannot_be_sent() -> None:
    """Each call of a team is refused with the path, until the driver's code can be sent again."""
    succeeds(
        START
        + """
import threading
import numpy as np
with weft.Team(2) as team:
    f = weft.function(mod.total, collect="sum", team=team, check=None)
    x = np.arange(4.0)
    assert f(x) == 6
    sent = helper.g
    helper.g = lambda x, lock=threading.Lock(): 3 * x
    for _ in range(3):
        try:
            f(x)
        except weft.InvalidType as error:
            assert "helper.g.__defaults__[0]" in str(error), error
        else:
            raise AssertionError
    helper.g = sent
    assert f(x) == 6
"""
    )


def test_what_changes_in_the_driver_during_a_call_of_a_team() -> None:
    """By another thread, or by the function there: the next call has it in all ranks."""
    succeeds(
        START
        + """
import threading
import numpy as np

driver = os.getpid()

def change():
    helper.RATE = mod.OPTIONS["add"] = 7

def rates(x):
    rate = helper.RATE, mod.OPTIONS["add"]
    if os.getpid() == driver:
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()
    return np.array([rate] * len(x))

with weft.Team(2) as team:
    f = weft.function(rates, collect="gather", team=team, check=None)
    assert f(np.ones(2)).tolist() == [[1, 0]] * 2
    for _ in range(2):
        assert f(np.ones(2)).tolist() == [[7, 7]] * 2
"""
    )


def test_an_interrupt_while_modules_are_compared() -> None:
    """Ctrl-C, or an exception of a signal handler of the program's own: it is raised, and the next
    call has all changes."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "armed.py").write_text("""
import signal

class Armed:
    def __reduce_ex__(self, _):
        if vars(signal).pop("armed", False):
            signal.raise_signal(signal.SIGUSR1)
        return Armed, ()

RATE = 1
armed = Armed()

def f(x):
    return x * RATE
""")
    succeeds(
        START
        + """
import signal
import armed

def interrupted(kind):
    def handler(*_):
        raise kind
    signal.signal(signal.SIGUSR1, handler)
    signal.armed = True
    try:
        weft.map(armed.f, [1, 2], n=2)
    except kind:
        return True

for kind in (KeyboardInterrupt, TimeoutError, ValueError):
    armed = importlib.reload(armed)
    assert interrupted(kind)  # at the first look at it, and later
    assert check(armed.f) == 1
    armed.RATE, armed.armed = 5, armed.Armed()
    assert interrupted(kind)
    assert check(armed.f) == 5
"""
    )


def test_objects_that_use_weft_while_they_are_compared() -> None:
    """Their code may run then."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "lively.py").write_text("""
import os
import helper, weft

class Lively:
    @property
    def __wrapped__(self):
        if "WEFT_CORES" not in os.environ:
            weft.map(helper.g, [1], n=1)
        raise AttributeError

lively = Lively()

def f(x):
    return x
""")
    succeeds(START + "import lively\nassert check(lively.f) == 1")


def test_a_module_that_workers_can_import_only_later() -> None:
    """The driver may have forgotten by then that it has told of it."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "fragile.py").write_text(
        "import os\nif 'FRAGILE' in os.environ:\n    raise RuntimeError('not now')\nX = 1\n"
    )
    succeeds(
        START
        + """
import fragile

def direct(x):
    return fragile.X

def by_name(x):
    return importlib.import_module("fra" + "gile").X

def extra(x):
    module = importlib.import_module("fra" + "gile")
    return module.EXTRA

weft.shutdown()  # from here on there is one worker
fragile.X = 5
os.environ["FRAGILE"] = "1"
try:
    weft.map(direct, [1], n=1)
    raise AssertionError
except RuntimeError as error:
    assert "not now" in str(error)
del os.environ["FRAGILE"]
Path("fragile.py").write_text("X = 1\\nEXTRA = 3\\n")
assert weft.map(extra, [1], n=1) == [3]  # as the worker has found it
assert weft.map(extra, [1], n=1) == [3]
assert weft.map(by_name, [1], n=1) == [1]  # which nobody has compared
assert weft.map(abs, [1], n=1) == [1]
assert weft.map(direct, [1], n=1) == [5]
assert weft.map(by_name, [1], n=1) == [5]
"""
    )


def test_what_cannot_be_brought_up_to_date() -> None:
    """It is an error that names it, never an old number; the next call begins anew."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "odd.py").write_text("""
import threading

class Fixed(type):
    def __setattr__(cls, name, value):
        pass

class Odd(metaclass=Fixed):
    def number(self):
        return 1

def locked():
    lock = threading.Lock()
    def f(x):
        with lock:
            return x + 1
    return f

add = locked()

def number(x):
    return Odd().number()

def added(x):
    return add(x)
""")
    succeeds(
        START
        + """
import odd

def error(f):
    try:
        weft.map(f, [1, 2], n=2)
    except Exception as error:
        return error

assert check(odd.number) == 1 and check(odd.added) == 2
text = Path("odd.py").read_text()
edit("odd.py", "return 1", "return 2")
importlib.reload(odd)
told = error(odd.number)
assert isinstance(told, weft.ModuleDiffers) and "odd.Odd" in str(told), repr(told)
assert "weft.shutdown()" in str(told)
assert isinstance(error(odd.number), weft.ModuleDiffers)
weft.shutdown()
assert check(odd.number) == 2

edit("odd.py", "x + 1", "x + 2")
importlib.reload(odd)
told = error(odd.added)
assert isinstance(told, weft.InvalidType) and "odd.add" in str(told), repr(told)
weft.shutdown()
assert check(odd.added) == 3

sys.modules["nowhere"] = type(sys)("nowhere")
nowhere = sys.modules["nowhere"]
nowhere.__file__ = "nowhere.py"
exec("def f(x): return x", vars(nowhere))
told = error(nowhere.f)
assert isinstance(told, ModuleNotFoundError) and "nowhere" in str(told), repr(told)
"""
    )


def test_large_data_in_a_module() -> None:
    """It is compared whole at every call, and a warning says so once; not if it is read-only."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "big.py").write_text("""
import numpy as np

TABLE = np.zeros(8_000_000)

def f(x):
    return TABLE[x]
""")
    succeeds(
        START
        + """
import warnings
import big

with warnings.catch_warnings(record=True) as caught:
    assert check(big.f) == 0
    big.TABLE[3] = 7
    assert weft.map(big.f, [2, 3, 4], n=2) == [0, 7, 0]
    assert check(big.f) == 0
assert len(caught) == 1 and caught[0].filename == __file__, caught
assert "big.TABLE (" in str(caught[0].message), caught[0].message
assert "big.TABLE.flags.writeable = False" in str(caught[0].message)

def look():  # the least of this thread's own seconds that a look takes
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        modules.look(["big"])
        seconds.append(time.thread_time() - began)
    return min(seconds)

from weft.engines.local.pool import modules
import time
compared = look()
big.TABLE.flags.writeable = False
assert check(big.f) == 0
assert look() < compared / 3
"""
    )


def test_changes_that_are_large_and_workers_that_end() -> None:
    """More than a socket holds at once; a module whose import ends the worker; a change in one
    thread while others map: every result is of one version."""
    folder = Path(os.environ["WEFT_TEST_FOLDER"])
    (folder / "large.py").write_text("TEXT = b'a'\n\ndef f(x):\n    return TEXT[:1], len(TEXT)\n")
    (folder / "ends.py").write_text(
        "import os\nif 'WEFT_CORES' in os.environ:\n    os._exit(3)\n\ndef f(x):\n    return x\n"
    )
    succeeds(
        START
        + """
import threading
import numpy as np
import ends, large

assert check(large.f) == (b"a", 1)
large.TEXT = b"b" * 5_000_000
assert check(large.f) == (b"b", 5_000_000)
with weft.Team(2) as team:
    f = weft.function(lambda x: x * len(large.TEXT), collect="gather", team=team)
    for size in (5_000_000, 3_000_000):
        large.TEXT = b"c" * size
        assert list(f(np.ones(2))) == [size] * 2

try:
    weft.map(ends.f, range(3), n=2)
    raise AssertionError
except weft.WorkerLost as error:
    assert "exit code 3" in str(error)

mixed = []

def map_often():
    for _ in range(20):
        found = weft.map(large.f, range(4), n=2)
        if len(set(found)) > 1:
            mixed.append(found)

threads = [threading.Thread(target=map_often) for _ in range(3)]
for thread in threads:
    thread.start()
number = 0
while any(thread.is_alive() for thread in threads):
    number += 1
    large.TEXT = b"%d" % (number % 10) * (number % 100 + 1)
for thread in threads:
    thread.join()
assert not mixed, mixed[0]
"""
    )


# in one line, as pytest compiles this module in its own way
OPERATIONS = {"one": lambda x: x + 1, "other": lambda x: x - 1}


def operate(x: int) -> int:
    return OPERATIONS["one"](x)


def test_a_module_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is patched there is patched in the workers."""
    assert weft.map(operate, range(3), n=2) == [1, 2, 3]
    monkeypatch.setitem(OPERATIONS, "one", OPERATIONS["other"])
    assert weft.map(operate, range(3), n=2) == [-1, 0, 1]


def test_autoreload_of_ipython() -> None:
    """In a notebook: the next cell after an edit computes with the new code, in functions, in
    replicas, and in what was imported from the module."""
    (Path(os.environ["WEFT_TEST_FOLDER"]) / "net.py").write_text("""
import numpy as np

class Net:
    def __init__(self):
        self.w = np.ones(1)

    def __call__(self, x):
        return x * self.w * 1

def double(x):
    return x * 2
""")
    succeeds(
        """
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()

def cell(text):
    result = shell.run_cell(text)
    result.raise_error()

def edit(old, new):
    text = Path("net.py").read_text()
    assert old in text
    Path("net.py").write_text(text.replace(old, new))

cell('''
%load_ext autoreload
%autoreload 2
import numpy as np
import weft
import net
from net import Net, double

model = Net()
x = np.ones(4)
team = weft.Team(2)
f = weft.function(model, collect="gather", team=team)
g = weft.function(double, collect="gather", team=team)
assert list(f(x)) == [1] * 4 and list(g(x)) == [2] * 4
assert weft.map(double, [1, 2], n=2) == weft.map(net.double, [1, 2], n=2) == [2, 4]
''')
edit("self.w * 1", "self.w * 7")
edit("x * 2", "x * 3")
cell('''
assert list(map(float, model(x))) == [7] * 4 and list(g.serial(x)) == [3] * 4
assert list(f(x)) == [7] * 4, f(x)
assert list(g(x)) == [3] * 4, g(x)
assert weft.map(double, [1, 2], n=2) == weft.map(net.double, [1, 2], n=2) == [3, 6]
assert weft.map(lambda x: Net()(x)[0], [1], n=2) == [7]
team.close()
''')
"""
    )
