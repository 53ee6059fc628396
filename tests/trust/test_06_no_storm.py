"""Workers that start workers: never without end, and nothing of them outlives the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import HANGS, marked_processes, run_python, run_script, wait_until, within

#: what the module does while it is imported, after `import weft` and `def f(x): return x * x`
AT_IMPORT = {
    "map": "R = weft.map(f, range(4), n=2)",
    "map_async": "R = weft.map_async(f, range(4), n=2).wait()",
    "distribute": "R = weft.distribute(f)([1, 2])",
    "function": "R = weft.function(f, collect='gather', team=weft.Team(2))([1.0, 2.0])",
}


@pytest.mark.parametrize("call", AT_IMPORT)
def test_a_module_that_maps_while_it_is_imported(call: str, tmp_path: Path) -> None:
    """Its workers import it to find the function, and do not map in turn: the program ends with an
    error that names the module and says what to write."""
    module = tmp_path / "impmod.py"
    module.write_text(f"import weft\ndef f(x):\n    return x * x\n{AT_IMPORT[call]}\n")
    process = subprocess.Popen(
        [sys.executable, "-c", "import impmod"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    most, began = 0, time.monotonic()
    while process.poll() is None and time.monotonic() - began < HANGS:
        most = max(most, len(marked_processes()))
        time.sleep(0.01)
    _, err = process.communicate()
    assert process.returncode == 1, err
    last = err[err.rindex("NestedTooDeep") :]
    assert f"the module 'impmod' ({module}:4) starts workers while it is imported" in last
    assert 'if __name__ == "__main__":' in last
    assert most <= 4, most  # the program, its fork server, two workers
    wait_until(lambda: not marked_processes(), within(1.0))


def test_a_module_that_maps_only_as_a_program(tmp_path: Path) -> None:
    """The line that the error tells to write works, and so does a map inside a function."""
    (tmp_path / "guarded.py").write_text(
        "import weft\n"
        "def f(x):\n    return x * x\n"
        "def squares():\n    return weft.map(f, range(4), n=2)\n"
        'if __name__ == "__main__":\n    print(squares())\n'
    )
    path = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    assert run_python("import guarded; print(guarded.squares())", env=path).out == "[0, 1, 4, 9]\n"
    assert run_script((tmp_path / "guarded.py").read_text()).out == "[0, 1, 4, 9]\n"


NESTED = """
import os, sys, time
import weft

def nest(depth):
    cores = os.environ.get("WEFT_CORES", "all")
    try:
        return [cores, *weft.map(nest, [depth + 1], **options)[0]]
    except weft.NestedTooDeep as error:
        assert 'engine="serial"' in str(error)
        assert weft.map(abs, [-depth], engine="serial") == [depth]
        return [cores, depth]
"""


def test_nested_maps_have_an_end() -> None:
    """Three levels of workers, each with its share of the cores; the innermost maps serially."""
    cores = len(os.sched_getaffinity(0))
    program = NESTED.replace("options", "{'n': 1}")
    outcome = run_script(f"{program}\nprint(nest(0))\n")
    assert outcome.out == f"{['all', *[str(cores)] * 3, 3]}\n", outcome
    program = NESTED.replace("options", "{'n': 2} if depth == 0 else {}")
    outcome = run_script(f"{program}\nprint(nest(0)[:2])\n")
    assert outcome.out == f"{['all', str(max(1, cores // 2))]}\n", outcome


DEEP = """
import os, sys, time
import weft

folder = sys.argv[1]

def nest(depth, folder=folder):
    open(f"{folder}/{os.getpid()}-{depth}", "w").close()
    if depth == 3:
        time.sleep(600)
    weft.map(nest, [depth + 1] * 2, n=2)

nest(0)
"""


def _start_deep(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", DEEP, str(folder)], stderr=subprocess.DEVNULL)


def test_a_killed_program_takes_all_levels_along(tmp_path: Path) -> None:
    """SIGKILL: a second later nothing of three levels of workers is left."""
    with _start_deep(tmp_path) as driver:
        wait_until(lambda: len(list(tmp_path.glob("*-3"))) == 8)
        assert len(marked_processes()) == 1 + 2 + 4 + 8 + 1 + 2 + 4  # workers, and fork servers
        driver.kill()
        driver.wait()
        wait_until(lambda: not marked_processes(), within(1.0))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_that_is_killed_while_its_workers_start(number: int, tmp_path: Path) -> None:
    """At any moment of the start of the levels, when interpreters are still loading modules."""
    for milliseconds in (30, 90, 150, 250, 400, 600):
        folder = tmp_path / str(milliseconds)
        folder.mkdir()
        with _start_deep(folder) as driver:
            time.sleep(milliseconds / 1000)
            driver.send_signal(number)
            driver.wait()
            wait_until(lambda: not marked_processes(), within(2.0))
