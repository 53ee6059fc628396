"""Seed 000 and Multiverso's Python names: its programs run as they are, and do what they say."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv
import weft
from multiverso import api, tables, utils
from multiverso.theano_ext import param_manager
from tests.hosts import Hosts
from tests.support import launch, run_command, run_python, run_ranks
from weft.engines.base import Group
from weft.errors import AlreadyInitialized, Disagreement, InvalidType, InvalidValue, NotInitialized

PROGRAMS = Path(__file__).parent / "programs"
#: the code blocks of seed 000, in its order but for the last, which goes before Theano's import
BLOCKS = ["theano_gpu", "typical", "master", "theano_shared", "lasagne"]
#: what its own tests and its first example did
OLD_PROGRAMS = ["old_tables", "old_sharedvar", "old_regression", "old_network"]


def run_in_turn(
    names: list[str],
    workers: int,
    launcher: str | Hosts,
    folder: Path,
    limit: float = 110.0,
) -> str:
    """Run programs one after the other in the same workers, of a launcher or on hosts; what they
    printed."""
    traces = folder / "traces"  # frameworks leave things in the temporary folder
    traces.mkdir(exist_ok=True)
    # a compiler takes longer than all the rest; small graphs do without
    env = {"TMPDIR": str(traces), "PYTENSOR_FLAGS": "linker=py,optimizer=fast_compile"}
    paths = [str(PROGRAMS / f"{name}.py") for name in names]
    runner = PROGRAMS / "in_turn.py"
    if launcher == "python":
        outcome = run_command([sys.executable, str(runner), *paths], env=env, limit=limit)
    elif isinstance(launcher, Hosts):
        each = workers // launcher.count
        outcome = launcher.launch(runner, each, *paths, env=env, timeout=limit)
    else:
        outcome = launch(runner, workers, *paths, env=env, limit=limit, launcher=launcher)
    assert outcome.code == 0, outcome
    assert outcome.out.count("done: ") == workers * len(names), outcome
    return outcome.out


@pytest.mark.parametrize(("workers", "launcher"), [(1, "python"), (2, "weft run"), (4, "mpirun")])
def test_the_blocks_of_the_tutorial(workers: int, launcher: str, tmp_path: Path) -> None:
    """Each is a program that ends well and has the results that the tutorial promises. After them
    what Multiverso's own tests and first example did."""
    out = run_in_turn([*BLOCKS, *OLD_PROGRAMS], workers, launcher, tmp_path)
    said = [line.split("] ")[-1] for line in out.splitlines() if "done" not in line]
    expected = [
        text for worker in range(workers) for text in (workers, worker, worker == 0)
    ]  # each worker prints three lines
    assert sorted(said) == sorted(map(str, expected)), out


def test_the_blocks_over_hosts(two_hosts: Hosts, tmp_path: Path) -> None:
    """The same programs, unchanged, on two hosts."""
    names = ["typical", "master", "theano_shared", "old_tables", "old_sharedvar"]
    run_in_turn(names, 2, two_hosts, tmp_path)


# what follows is called in each of several workers, and in this process, where it is the only one


def names(group: Group) -> None:
    """Session."""
    start_anew()
    assert mv.workers_num() == mv.num_workers() == group.size
    assert mv.worker_id() == mv.server_id() == group.rank
    assert mv.is_master_worker() == (group.rank == 0)
    with pytest.raises(AlreadyInitialized, match=r"test_multiverso\.py:\d"):
        mv.init()  # the error names the line of the program, not one of multiverso's
    mv.barrier()
    mv.shutdown()
    mv.shutdown()  # does nothing
    for call in (mv.barrier, mv.workers_num, mv.worker_id, mv.is_master_worker, mv.server_id):
        with pytest.raises(NotInitialized):
            call()
    with pytest.raises(NotInitialized):
        mv.ArrayTableHandler(3)
    with pytest.raises(InvalidType, match="sync=1"):
        mv.init(sync=1)  # type: ignore[arg-type]


def start_anew(sync: bool = False) -> None:
    weft.shutdown()
    mv.init(sync=sync)


def old_forms(group: Group) -> None:
    """The flags of the first releases, the modules, and the library's names for its functions."""
    for arguments, in_step in (
        ([[]], False),
        ([()], False),
        ([["-sync=true"]], True),
        ([["", "-sync=true"]], True),
        ([["program.py", "-sync=false"]], False),
        ([True], True),
        ([True, []], True),
    ):
        weft.shutdown()
        api.init(*arguments)
        assert ("bsp" in repr(mv.ArrayTableHandler(1))) == in_step, arguments
    weft.shutdown()
    mv.init(args=["-sync=true"])
    assert "bsp" in repr(mv.MatrixTableHandler(1, 1))
    start_anew()
    for name in api.__all__:
        assert getattr(api, name) is getattr(mv, name)
    library = utils.Loader.get_lib()
    assert library is utils.Loader.get_lib()
    assert library.MV_NumWorkers() == group.size
    assert library.MV_WorkerId() == library.MV_ServerId() == group.rank
    library.MV_Barrier()
    converted = utils.convert_data([1, 2.5])
    assert (converted.dtype, converted.tolist()) == (np.float32, [1, 2.5])
    given = np.ones(2, np.float32)
    utils.convert_data(given)[0] = 5
    assert given[0] == 1, "a copy"
    for wrong, kind in (("abc", InvalidType), (None, InvalidType), ([[1], [1, 2]], InvalidValue)):
        with pytest.raises(kind, match=r"^data is "):
            utils.convert_data(wrong)
    with pytest.raises(NotImplementedError, match="ArrayTableHandler or a MatrixTableHandler"):
        tables.TableHandler(3)
    assert issubclass(mv.ArrayTableHandler, tables.TableHandler)
    assert (mv.ArrayTableHandler(6)._size, mv.MatrixTableHandler(2, 3)._size) == (6, 6)
    library.MV_ShutDown()
    for arguments, error, message in (
        ([1], InvalidType, r"sync=1\): expected True or False, or a list of flags"),
        (["-sync=true"], InvalidType, "sync='-sync=true'"),
        ([False, "-sync=true"], InvalidType, "args='-sync=true'"),
        ([["-updater_type=sgd"]], InvalidValue, "'-updater_type=sgd' has no meaning here"),
        ([["a", "b"]], InvalidValue, "'b' has no meaning here"),
        ([[3]], InvalidValue, "flag 3 has no meaning here"),
    ):
        with pytest.raises(error, match=message):
            mv.init(*arguments)


def advice(group: Group) -> None:
    """Errors say what can be written here: no weft.init(), which takes other arguments."""
    start_anew()
    handlers = mv.ArrayTableHandler(2), mv.MatrixTableHandler(2, 2)
    manager = Manager(Model(1))
    calls: list[Callable[[], Any]] = [
        mv.barrier,
        mv.workers_num,
        mv.num_workers,
        mv.worker_id,
        mv.server_id,
        mv.is_master_worker,
        *(handler.get for handler in handlers),
        lambda: handlers[0].add([1, 1]),
        lambda: handlers[1].add([1, 1], [0]),
        manager.sync_all_param,
        lambda: mv.ArrayTableHandler(2),
        lambda: Manager(Model(1)),
    ]
    with pytest.raises(AlreadyInitialized) as caught:
        mv.init()
    said = [str(caught.value)]
    mv.shutdown()
    for call in calls:
        with pytest.raises(NotInitialized) as missing:
            call()
        said.append(str(missing.value))
    for text in said:
        assert "mv.init()" in text, text
        assert "weft.init" not in text, text
        assert "weft.shutdown" not in text, text
        assert "split()" not in text, text


def array_tables(group: Group) -> None:
    """All kinds of data add up, exactly once per worker; results are copies."""
    start_anew()
    size = 6
    kinds: list[Any] = [
        range(size),
        [0, 1, 2, 3, 4, 5],
        [float(number) for number in range(size)],
        tuple(range(size)),
        np.arange(size, dtype=np.float64),
        np.arange(size, dtype=np.int32),
        np.arange(size, dtype=np.float32).reshape(2, 3),
        np.arange(2 * size, dtype=np.float32)[::2] / 2,
    ]
    table = mv.ArrayTableHandler(size)
    assert table.get().tolist() == [0] * size
    mv.barrier()
    for number, data in enumerate(kinds):
        table.add(data, sync=number % 2 == 0)
    table.add(data=kinds[0])
    mv.barrier()
    found = table.get()
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    factor = (len(kinds) + 1) * group.size
    assert found.tolist() == [factor * number for number in range(size)]
    found[...] = 0
    assert table.get()[1] == factor

    # float64 is rounded, and other dtypes may be chosen
    table = mv.ArrayTableHandler(1, init_value=np.array([0.1]))
    assert table.get()[0] == np.float32(0.1)
    wide = mv.ArrayTableHandler(2, dtype="float64")
    whole = mv.ArrayTableHandler(2, [2**40, 0], dtype=np.int64)
    mv.barrier()
    wide.add([1e-12, 1.0])
    whole.add([1, 2**50])
    mv.barrier()
    assert np.allclose(wide.get(), [group.size * 1e-12, group.size], rtol=1e-12)
    assert whole.get().tolist() == [2**40 + group.size, group.size * 2**50]
    assert "ArrayTable(2, dtype='int64'" in repr(whole)


def matrix_tables(group: Group) -> None:
    """All rows and some, flat and as a matrix; rows that are named twice."""
    start_anew()
    workers = group.size
    table = mv.MatrixTableHandler(3, 2)
    mv.barrier()
    table.add([[1, 2], [3, 4], [5, 6]])
    table.add(range(6))
    table.add(np.ones((3, 2)))
    table.add(data=[1] * 6, sync=True)
    mv.barrier()
    start = workers * np.array([[3.0, 5.0], [7.0, 9.0], [11.0, 13.0]])
    found = table.get()
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    assert found.tolist() == start.tolist()
    assert table.get([2, 0, 2]).tolist() == start[[2, 0, 2]].tolist()
    assert table.get(row_ids=range(2)).tolist() == start[:2].tolist()
    for one in (1, np.int32(1), np.array(1), [1]):
        assert table.get(one).tolist() == start[[1]].tolist(), "rows always come as a matrix"
    assert table.get([]).shape == (0, 2)
    mv.barrier()
    table.add([[1, 1], [2, 2], [3, 3]], row_ids=[0, 2, 0])
    table.add(np.array([10.0, 20.0]), row_ids=1)
    table.add([7, 7, 8, 8], np.array([1, 2], dtype=np.uint8), sync=False)
    table.add([], [])
    mv.barrier()
    change = workers * np.array([[4.0, 4.0], [17.0, 27.0], [10.0, 10.0]])
    assert table.get().tolist() == (start + change).tolist()


def initial_values(group: Group) -> None:
    """The master's count; whatever the others pass, even none or nonsense."""
    start_anew()
    master = mv.is_master_worker()
    first = mv.ArrayTableHandler(3, init_value=[1, 2, 3] if master else [7, 7, 7])
    second = mv.ArrayTableHandler(3, np.arange(3) if master else None)
    third = mv.ArrayTableHandler(3, np.ones(3) if master else "nonsense")
    fourth = mv.ArrayTableHandler(3, None if master else [7, 7, 7])
    flat = mv.MatrixTableHandler(2, 2, init_value=range(4) if master else None)
    square = mv.MatrixTableHandler(2, 2, [[1, 2], [3, 4]] if master else np.ones(99))
    assert first.get().tolist() == [1, 2, 3]
    assert second.get().tolist() == [0, 1, 2]
    assert third.get().tolist() == [1, 1, 1]
    assert fourth.get().tolist() == [0, 0, 0]
    assert flat.get().tolist() == [[0, 1], [2, 3]]
    assert square.get().tolist() == [[1, 2], [3, 4]]
    for wrong in ([1, 2], [1, 2, 3, 4], "abc", [[1], [2, 3]], [None] * 3):
        for make in (
            lambda value: mv.ArrayTableHandler(3, value),
            lambda value: mv.MatrixTableHandler(3, 1, value),
        ):
            expected: Any = (InvalidValue, InvalidType) if master else Disagreement
            with pytest.raises(expected):
                make(wrong)
    assert mv.ArrayTableHandler(1, [5]).get().tolist() == [5], "a refused table blocks no other"


def bad_input(group: Group) -> None:
    """Weft's errors, which name the value; and nothing is added."""
    start_anew()
    array, matrix = mv.ArrayTableHandler(3), mv.MatrixTableHandler(3, 2)
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: mv.ArrayTableHandler(0), InvalidValue, "size=0"),
        (lambda: mv.ArrayTableHandler(-1), InvalidValue, "size=-1"),
        (lambda: mv.ArrayTableHandler(2.5), InvalidType, "size=2.5: expected a whole number$"),  # type: ignore[arg-type]
        (lambda: mv.ArrayTableHandler("3"), InvalidType, "size='3'"),  # type: ignore[arg-type]
        (lambda: mv.MatrixTableHandler(2, 0), InvalidValue, "^num_col=0"),
        (lambda: mv.MatrixTableHandler(0, 2), InvalidValue, "^num_row=0"),
        (lambda: mv.ArrayTableHandler(3, dtype="letters"), InvalidType, "letters"),
        (lambda: array.add([1, 2]), InvalidValue, r"^data of shape \(2,\) was added"),
        (lambda: array.add(np.ones(4)), InvalidValue, r"\(4,\)"),
        (lambda: array.add(None), InvalidType, "^data is None"),
        (lambda: array.add("abc"), InvalidType, "abc"),
        (lambda: array.add(np.ones(3, complex)), InvalidType, "^data of complex128 for a table"),
        (lambda: array.add([1, 2, 3], sync="yes"), InvalidType, "yes"),  # type: ignore[arg-type]
        (matrix.add, InvalidType, "None"),
        (lambda: matrix.add(np.ones((2, 2))), InvalidValue, r"\(4,\)"),
        (lambda: matrix.add([1, 2], row_ids=[3]), InvalidValue, "row 3"),
        (lambda: matrix.add([1, 2], row_ids=[-1]), InvalidValue, "row -1"),
        (lambda: matrix.add([1, 2], row_ids=[0.5]), InvalidType, r"^row_ids is \[0.5\]"),
        (lambda: matrix.add([1, 2, 3], row_ids=[0]), InvalidValue, r"\(3,\)"),
        (lambda: matrix.add([1, 2], [0], sync=None), InvalidType, "None"),  # type: ignore[arg-type]
        (lambda: matrix.get([3]), InvalidValue, "row 3"),
        (lambda: matrix.get([True]), InvalidType, "True"),
        (lambda: matrix.get([[0]]), InvalidValue, r"^row_ids has shape \(1, 1\)"),
        (lambda: matrix.get(slice(0, 1, 0)), InvalidValue, "^row_ids=slice"),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
    assert not array.get().any()
    assert not matrix.get().any()
    if group.size > 1:
        with pytest.raises(Disagreement):
            mv.ArrayTableHandler(3 + mv.worker_id())
    mv.shutdown()
    with pytest.raises(NotInitialized):
        array.get()
    with pytest.raises(NotInitialized):
        matrix.add([1, 2], [0])


def in_step(group: Group) -> None:
    """After init(sync=True) every worker's i-th get is the same: everybody's first i adds."""
    start_anew(sync=True)
    workers, worker = group.size, group.rank
    pause = random.Random(worker)
    array = mv.ArrayTableHandler(2, init_value=[5, 0])
    matrix = mv.MatrixTableHandler(3, 2)
    for step in range(4):
        expected = 5 + sum(10**one for one in range(workers)) * step
        assert array.get().tolist() == [expected, step * workers]
        assert matrix.get([0, 1]).tolist() == [[step * workers] * 2, [0, 0]]
        time.sleep(pause.random() / 50)
        array.add([10**worker, 1], sync=step == 2)
        time.sleep(pause.random() / 50)
        matrix.add([1, 1], row_ids=[0])
    # one that ends early releases the others
    before = array.get()
    if worker == workers - 1 > 0:
        mv.shutdown()
        return
    for step in range(1, 4):
        array.add([0, 1])
        assert array.get()[1] == before[1] + step * max(1, workers - 1)
    # the next session is not in step, unless it says so
    mv.shutdown()
    if workers == 1:
        mv.init()
        assert "consistency=async" in repr(mv.ArrayTableHandler(1))


class Model:
    """Somebody's model, with parameters of two dtypes."""

    def __init__(self, start: int) -> None:
        self.weights, self.steps = np.full((2, 2), start, np.float64), start


class Manager(param_manager.MVModelParamManager):
    def get_all_param_values(self) -> Any:
        return [self.model.weights, self.model.steps]

    def set_all_param_values(self, params: Any) -> None:
        self.model.weights, self.model.steps = params[0], int(params[1])


def own_managers(group: Group) -> None:
    """A model of any kind is shared by who says how it is read and written."""
    start_anew()
    workers, worker = group.size, group.rank
    model = Model(3 + worker)
    manager = Manager(model)
    assert manager.model is model
    assert model.weights.tolist() == [[3, 3], [3, 3]]
    assert model.steps == 3
    mv.barrier()
    model.weights = model.weights + (worker + 1) * 1e-9  # lost if it were float32
    model.steps += 10
    manager.sync_all_param()
    mv.barrier()
    manager.sync_all_param()
    total = sum(range(1, workers + 1))
    assert np.allclose(model.weights, 3 + total * 1e-9, rtol=1e-14, atol=0)
    assert model.steps == 3 + 10 * workers
    assert not np.shares_memory(model.weights, manager._values[0])
    with pytest.raises(InvalidValue, match="tbh of parameters of float64, int64: each dtype has a"):
        manager.tbh  # noqa: B018  the access is the test

    class Weights(Manager):
        def get_all_param_values(self) -> Any:
            return [self.model.weights]

        def set_all_param_values(self, params: Any) -> None:
            (self.model.weights,) = params

    model = Model(2)
    one_dtype = Weights(model)
    assert isinstance(one_dtype.tbh, mv.ArrayTableHandler)
    assert one_dtype.tbh.get().tolist() == [2, 2, 2, 2]
    mv.barrier()
    one_dtype.tbh.add([1, 0, 0, 0])
    mv.barrier()
    one_dtype.sync_all_param()
    assert model.weights.tolist() == [[2 + workers, 2], [2, 2]]
    with pytest.raises(TypeError, match="abstract"):
        param_manager.MVModelParamManager(model)  # type: ignore[abstract]

    class Broken(Manager):
        def get_all_param_values(self) -> Any:
            if mv.is_master_worker():
                raise KeyError("no such parameter")
            return super().get_all_param_values()

    with pytest.raises(KeyError if worker == 0 else Disagreement):
        Broken(model)

    class Empty(Manager):
        def get_all_param_values(self) -> Any:
            return []

    with pytest.raises((InvalidType, InvalidValue)):
        Empty(model)
    mv.barrier()
    mv.shutdown()
    with pytest.raises(NotInitialized):
        manager.sync_all_param()


CHECKS = [
    names,
    old_forms,
    advice,
    array_tables,
    matrix_tables,
    initial_values,
    bad_input,
    own_managers,
    in_step,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_as_a_single_process(check: Callable[[Group], None]) -> None:
    """Everything works in one process, which is worker 0 of 1."""
    check(weft.init())


@pytest.mark.parametrize(("workers", "launcher"), [(2, "weft run"), (4, "mpirun")])
def test_with_several_workers(workers: int, launcher: str) -> None:
    """The same with workers that other launchers start too."""

    def body(group: Group) -> None:
        for check in CHECKS:
            check(group)

    run_ranks(workers, body, launcher=launcher)


def test_advice_to_who_waits_in_vain(tmp_path: Path) -> None:
    """Neither `mv.barrier()` nor `mv.init()` has a timeout: the error names the variable."""
    outcome = launch(
        """
import os, sys, time
import multiverso as mv
import weft

mv.init()
if mv.is_master_worker():
    weft.group().timeout = 0.2
    try:
        mv.barrier()
    except TimeoutError as error:
        print(type(error).__name__, error)
    open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
""",
        2,
        str(tmp_path / "ready"),
        options=("--no-prefix",),
    )
    assert outcome.code == 0, outcome
    assert outcome.out.startswith("Stalled rank 1 of group"), outcome
    assert "set the variable WEFT_TIMEOUT to more seconds" in outcome.out
    assert "timeout=" not in outcome.out


def test_importing_loads_no_framework() -> None:
    """Multiverso and all of its extensions, but for Keras's callbacks, load when they are used."""
    outcome = run_python(
        """
import sys
import multiverso
from multiverso import torch_ext
from multiverso.theano_ext import param_manager, sharedvar
from multiverso.theano_ext.lasagne_ext import param_manager
from multiverso.theano_ext.keras_ext import param_manager
print({"torch", "pytensor", "keras", "jax", "lasagne"} & set(sys.modules) or "none")
"""
    )
    assert outcome.out == "none\n", outcome


def test_a_missing_package_is_named_with_its_pip_line() -> None:
    """Whatever needs a framework says which, and how to install it."""
    outcome = run_python(
        """
import sys
for name in ("torch", "pytensor", "keras"):
    sys.modules[name] = None  # as if it was not installed
import multiverso as mv
from multiverso import torch_ext
from multiverso.theano_ext import sharedvar
from multiverso.theano_ext.keras_ext.param_manager import KerasParamManager
from multiverso.theano_ext.lasagne_ext.param_manager import MVNetParamManager
from weft.errors import MissingPackage

def import_callbacks():
    from multiverso.theano_ext.keras_ext import callbacks

mv.init()
for call in (
    lambda: torch_ext.ArrayTableHandler(1),
    lambda: torch_ext.MatrixTableHandler(1, 1),
    lambda: sharedvar.mv_shared(1.0),
    lambda: MVNetParamManager([]),
    lambda: KerasParamManager(None),
    import_callbacks,
):
    try:
        call()
    except MissingPackage as error:
        assert isinstance(error, ImportError)
        print(str(error).split()[-1])
print(mv.ArrayTableHandler(1).get())
"""
    )
    extras = ["torch", "torch", "pytensor", "pytensor", "keras", "keras"]
    assert outcome.out.splitlines() == [f"'weft[{name}]'".strip() for name in extras] + ["[0.]"]


@pytest.mark.parametrize("workers", [1, 2])
def test_shared_variables_and_networks(workers: int, tmp_path: Path) -> None:
    """PyTensor: every kind of variable, graphs, pickles; managers of lists, dicts and layers."""
    run_in_turn(["checks_pytensor"], workers, "weft run", tmp_path)


def test_models_of_keras(tmp_path: Path) -> None:
    """Keras: the manager and the callback of `fit`."""
    run_in_turn(["checks_keras"], 2, "weft run", tmp_path)
