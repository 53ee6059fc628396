"""synkhronos's fork and close, and ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import synkhronos as synk
import weft
from weft.errors import (
    AlreadyInitialized,
    InvalidType,
    InvalidValue,
    NotInitialized,
    TeamBroken,
    WorkerLost,
)

X = np.arange(10, dtype="float32").reshape(5, 2)


def test_before_between_and_after() -> None:
    """Calls need processes; functions outlive them."""
    with pytest.raises(AlreadyInitialized, match=r"made 2 processes.*\n.*synkhronos\.close\(\)"):
        synk.fork(2)
    x = pt.matrix("x", dtype="float32")
    s = pytensor.shared(np.zeros(2, "float32"), "s")
    f = synk.function([x], (x.sum(), "sum"), updates=[(s, s + x.sum(axis=0))], name="f")
    assert f(X) == 45
    synk.close()
    synk.close()
    calls: list[tuple[str, Any]] = [
        ("f", lambda: f(X)),
        ("distribute", synk.distribute),
        ("gather", lambda: synk.gather(s)),
        ("set_value", lambda: synk.set_value(0, s, [1, 1])),
    ]
    for name, call in calls:
        with pytest.raises(NotInitialized, match=rf"{name}\S* was called after synkhronos\.close"):
            call()
    assert f.as_theano(X) == 45
    assert synk.fork(2, master_rank=1) == 2
    ranks_are_the_masters(f, s)
    weft.shutdown()  # closes too
    with pytest.raises(NotInitialized):
        f(X)


def ranks_are_the_masters(f: Any, s: Any) -> None:
    """This process is rank 1: it has the last rows."""
    synk.broadcast(s, [0, 0])
    x = pt.matrix("x", dtype="float32")
    rows = synk.function([x], [(x, "gather"), (x.sum(), None)])
    assert (rows(X)[0] == X).all()
    assert rows(X)[1] == X[2:].sum()
    assert rows(X[:1])[1] == X[0].sum()  # the last process has it, which is this one
    f(X)
    assert s.get_value().tolist() == X[2:].sum(axis=0).tolist()
    assert synk.get_value(1, s).tolist() == s.get_value().tolist()
    assert synk.gather(s).tolist() == [X[:2].sum(axis=0).tolist(), X[2:].sum(axis=0).tolist()]
    m = pytensor.shared(np.zeros((1, 2), "float32"), "m")
    used = synk.function([], m.sum())
    synk.scatter(m, X)
    assert synk.get_lengths(m) == [2, 3]
    assert m.get_value().tolist() == X[2:].tolist()
    synk.all_gather(m)
    assert (synk.get_value(0, m) == X).all()
    assert used() == 45


def test_a_lost_worker() -> None:
    """Is told at once; new processes go on with this one's values."""
    synk.close()
    synk.fork(2)
    s = pytensor.shared(np.ones(2, "float32"), "s")
    f = synk.function([], (s.sum(), "sum"))
    assert f() == 4
    s.set_value(np.zeros(2, "float32"))
    team = weft._api.team.default_team()
    advice = r"with the driver's values:\n    synkhronos\.close\(\)\n    synkhronos\.fork\(\)$"
    with pytest.raises(WorkerLost, match=rf"rank 1 of a team[^$]*{advice}"):
        team.backend.call(end, [()] * 2)
    with pytest.raises(TeamBroken, match=rf"cannot go on: it has lost a worker[^$]*{advice}"):
        f()
    synk.close()
    synk.fork(2)
    assert f() == 0


def end(member: Any) -> None:
    if member.rank:
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_fork_refuses() -> None:
    """And after that it can be called again."""
    synk.close()
    for wrong, kind in ((0, InvalidValue), ("2", InvalidType)):
        with pytest.raises(kind, match=f"n={wrong!r}"):
            synk.fork(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="master_rank='0'"):
        synk.fork(2, master_rank="0")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="master_rank=2: expected a rank of 0 to 1"):
        synk.fork(2, master_rank=2)
    assert synk.fork(1, use_gpu=False) == 1
    x = pt.matrix("x", dtype="float32")
    f = synk.function([x], [x.mean(), (x, "gather")])
    assert f(X, num_slices=2)[0] == X.mean()
    assert (f(X, batch=[1, 2])[1] == X[1:3]).all()
    synk.close()


def test_fork_as_it_was_called() -> None:
    """Two processes at least, since programs name rank 1; all arguments of both generations."""
    synk.close()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cores)])
    try:
        assert synk.fork() == 2
    finally:
        os.sched_setaffinity(0, cores)
    synk.close()
    assert synk.fork(2, True, 1, False, 100, 16) == 2
    assert owns_last_rows()
    synk.close()
    assert synk.fork(n_gpu=2, master_rank=1) == 2
    assert owns_last_rows()
    synk.close()
    assert synk.fork(2, 1) == 2  # February's second argument
    assert owns_last_rows()
    synk.close()
    assert synk.fork(n_parallel=2, profile_workers=True, max_n_var=1, max_dim=1) == 2
    assert not owns_last_rows()
    synk.close()
    assert synk.fork(2, use_gpu=0, master_rank=1) == 2  # no rank, whatever its type
    assert owns_last_rows()
    synk.close()
    assert synk.fork(2, 1, 0) == 2
    assert not owns_last_rows()
    synk.close()
    with pytest.raises(InvalidType, match="fork got 'master_rank' twice: by its place, and by its"):
        synk.fork(2, 1, master_rank=1)
    assert synk.fork(2) == 2


def owns_last_rows() -> bool:
    """Whether this process's part of the rows is that of rank 1."""
    x = pt.matrix("x", dtype="float32")
    return np.array_equal(synk.function([x], (x, None))(X), X[2:])


def test_three_processes() -> None:
    """Rows split as they did: 8 are 2, 3 and 3."""
    synk.close()
    assert synk.fork(3) == 3
    x = pt.matrix("x", dtype="float32")
    m = pytensor.shared(np.zeros((1, 2), "float32"), "m")
    f = synk.function([x], (x.shape[0], None), updates=[(m, x)])
    eight = np.arange(16, dtype="float32").reshape(8, 2)
    parts = [eight[:2], eight[2:5], eight[5:]]
    assert f(eight) == 2
    assert [synk.get_value(rank, m).tolist() for rank in range(3)] == [p.tolist() for p in parts]
    f(np.zeros((20, 2), "float32"), batch=slice(3, 11))
    assert synk.get_lengths(m) == [2, 3, 3]
    synk.scatter(m, eight)
    assert [synk.get_value(rank, m).tolist() for rank in range(3)] == [p.tolist() for p in parts]
    synk.scatter(m, eight, batch=4)
    assert synk.get_lengths(m) == [1, 1, 2]
    g = synk.function([x], (x.sum(axis=1), "gather"))
    for rows in range(10):
        assert g(eight, batch=rows % 9).tolist() == eight[: rows % 9].sum(axis=1).tolist()
    synk.close()
    synk.fork(2)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each process, where there are several; this process's is restored."""
    synk.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0,GPU-1")
    if synk.get_n_gpu() != 2:  # pragma: no cover
        pytest.skip("names of GPUs are not taken here")
    assert synk.fork() == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    team = weft._api.team.default_team()
    assert team.backend.call(visible, [()] * 2) == ["GPU-0", "GPU-1"]
    synk.close()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert synk.fork(3) == 3  # they share them
    team = weft._api.team.default_team()
    assert team.backend.call(visible, [()] * 3) == ["GPU-0", "GPU-1", "GPU-0"]
    synk.close()
    assert synk.fork(2, use_gpu=False) == 2
    team = weft._api.team.default_team()
    assert team.backend.call(visible, [()] * 2) == ["GPU-0,GPU-1"] * 2
    synk.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0")
    assert synk.get_n_gpu() == 1
    assert synk.fork(2) == 2  # they see it all the same
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0"


def visible(member: Any) -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]
