"""Classes of the script by value: made once, and changed only by where they are from."""

from __future__ import annotations

from tests.support import run_python


def test_a_class_stays_what_it_is_where_it_is_defined() -> None:
    """A process takes attributes from the one that it had the class from first, and deletes those
    that are gone; where the class is defined, it stays as it is."""
    outcome = run_python("""
import pickle
from weft._core import pickling

class Model:
    rate = 1
    names = []

names, first = Model.names, pickling.dumps(Model)
Model.rate = 2
assert pickle.loads(first) is Model and Model.rate == 2 and Model.names is names

def send(kind, sender):
    pickling._this_process = lambda: sender
    return pickling.dumps(kind)

# a copy under another number, as a worker has it
source = type("Source", (), {"__module__": "__main__", "rate": 1, "gone": 1})
packed = send(source, "driver")
del pickling._defined_here[source]  # as if it were not this process's
assert pickle.loads(packed) is source
source.rate = 5
del source.gone
later = send(source, "driver")
source.gone, source.rate = 1, 0
pickle.loads(later)
assert source.rate == 5 and not hasattr(source, "gone")
source.rate = 7
foreign, own = send(source, "another worker"), send(source, "driver")
source.rate = 5
pickle.loads(foreign)
assert source.rate == 5
pickle.loads(own)
assert source.rate == 7
print("done")
""")
    assert (outcome.code, outcome.out) == (0, "done\n"), outcome
