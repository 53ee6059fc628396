"""The front page: what it shows is what happens, and a line to change is the line to write."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.pages import ROOT, Shown, shown
from tests.support import run_command, run_script

PAGE = ROOT / "README.md"
SHOWN = shown(PAGE)


def test_the_first_screen() -> None:
    """Three programs of eight lines at most, before anything else is told."""
    first = PAGE.read_text().partition("\n## ")[0]
    programs = [one for one in SHOWN if one.before and one.before in first]
    assert [one.command[-1] for one in programs] == ["share.py", "split.py", "map.py"]
    for one in programs:
        assert one.before
        assert one.before.count("\n") <= 8
    assert "pip install ." in first
    assert "make demo" in first
    assert "make test" in first


@pytest.mark.parametrize("one", SHOWN, ids=lambda one: one.command[-1])
def test_what_is_shown_is_what_happens(one: Shown, tmp_path: Path) -> None:
    """Pasted into a file, a block prints what stands below it; in errors, but for the numbers."""
    program = {"python": [sys.executable], "weft": [sys.executable, "-m", "weft"]}[one.command[0]]
    if one.before:
        (tmp_path / one.command[-1]).write_text(one.before)
    folder = tmp_path if one.before else ROOT
    out = run_command([*program, *one.command[1:]], folder=folder).out
    if "(pid " in one.output:
        one, out = replace(one, output=without_numbers(one.output)), without_numbers(out)
    assert one.is_printed_by(out), f"the page has\n{one.output}\nand it was\n{out}"


def without_numbers(text: str) -> str:
    """Ranks that live may be in their next call by then, or not yet in it; and memory may have run
    out elsewhere on the machine at that moment, as other tests have it do."""
    text = re.sub(" +", " ", text.replace(", likely out of memory", ""))
    text = re.sub(r"(?m)^( +\d .* alive +)(after )?\w+ +", r"\1barrier ", text)
    return re.sub(r"\d+", "0", text)


@dataclass(frozen=True)
class Change:
    """What stands around a line of the table and the line that replaces it, when both are tried."""

    old_before: str
    new_before: str
    old_after: str
    new_after: str


RESULTS = "print(list(results))"
ITEMS = """
def fun(item):
    return item * item

items = range(5)
"""
POOL = """
import multiprocessing

def Pool(n):
    return multiprocessing.get_context("fork").Pool(n)
"""
GRAPH = """
import pytensor.tensor as pt
import synkhronos
synkhronos.fork(2)
x, y = pt.vector("x"), pt.vector("y")
loss = ((x - y) ** 2).mean()
"""
PLAIN = """
def loss(x, y):
    return ((x - y) ** 2).mean()
"""
MODEL = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.arange(15.0).reshape(5, 3) / 15, torch.ones(5, 1)

def loss(model, x, y):
    return (model(x) - y).square().mean()
"""
DDP = """
import tempfile
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
folder = tempfile.TemporaryDirectory()
init_process_group("gloo", init_method=f"file://{folder.name}/store", rank=0, world_size=1)
"""
DDP_STEP = """
value = loss(model, x, y)
value.backward()
optimizer.step()
print(f"{value.item():.5f} {model.module.bias.item():.5f}")
torch.distributed.destroy_process_group()
"""
STEP = "print(f'{step(x, y):.5f} {model.bias.item():.5f}')"
ARRAY = "import numpy\narray = numpy.ones(3)\n"
TABLE = "table.add([1, 2, 3])\nprint(table.get())"
CALL = "import numpy\nprint(float(f(numpy.array([1.0, 2.0, 4.0]), numpy.ones(3))))"

CHANGES = {
    "Multiverso": Change(
        "import multiverso\nmultiverso.init()\nsize = 3", "weft.init()\nsize = 3", TABLE, TABLE
    ),
    "Synkhronos": Change(GRAPH, PLAIN, f"{CALL}\nsynkhronos.close()", CALL),
    "Playdoh": Change(f"import playdoh\n{ITEMS}", ITEMS, RESULTS, RESULTS),
    "joblib": Change(f"from joblib import Parallel, delayed\n{ITEMS}", ITEMS, RESULTS, RESULTS),
    "multiprocessing": Change(POOL + ITEMS, ITEMS, RESULTS, RESULTS),
    "DDP": Change(MODEL + DDP, MODEL, DDP_STEP, STEP),
    "mpi4py": Change(
        f"from mpi4py import MPI\ncomm = MPI.COMM_WORLD\n{ARRAY}",
        f"weft.init()\n{ARRAY}",
        "print(array)",
        "print(array)",
    ),
    "Ray": Change(
        f"import ray\nray.init(num_cpus=2)\n{ITEMS}\nfun = ray.remote(fun)",
        ITEMS,
        RESULTS,
        RESULTS,
    ),
}
#: small graphs without a compiler, and Open MPI without the shared memory that it leaves behind
SETTINGS = {"PYTENSOR_FLAGS": "linker=py,optimizer=fast_compile", "OMPI_MCA_btl": "self"}


@pytest.mark.parametrize("name", CHANGES)
def test_the_line_to_change(name: str) -> None:
    """The old line and the new one print the same, where the other library is at hand."""
    old, new = table_of_changes()[name]
    change = CHANGES[name]
    after = run_script(f"import weft\n{change.new_before}\n{new}\n{change.new_after}\n")
    assert after.code == 0, after
    assert after.out
    if name == "Ray" and importlib.util.find_spec("ray") is None:
        return
    # for what the others leave; of Ray's sockets the names must be short
    with tempfile.TemporaryDirectory() as traces:
        before = run_script(
            f"{change.old_before}\n{old}\n{change.old_after}\n",
            env={**SETTINGS, "TMPDIR": traces},
        )
    assert before.code == 0, before
    assert before.out == after.out, (before, after)


def test_every_line_to_change_is_tried() -> None:
    """No row of the table without a trial, and none that is gone."""
    assert list(table_of_changes()) == list(CHANGES)


def table_of_changes() -> dict[str, tuple[str, str]]:
    """Where one comes from: the line there, the line here."""
    rows = re.findall(r"^\| (\w+) \| `(.+)` \| `(.+)` \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (old, new) for name, old, new in rows}
