"""The package as it is shipped: layers, names, wheel, documents."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import weft
from tests.support import run_python, run_script
from weft import errors
from weft.engines.registry import ENGINES

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "weft"

#: what each layer may import from; "weft" stands for the public names
LAYERS = {
    "__main__": {"cli"},
    "cli": {"_core", "_version", "doctor", "engines", "errors", "resources"},
    "doctor": {"_core", "_version", "doctor", "engines", "errors", "kernels", "resources", "weft"},
    "_api": {"_api", "_core", "adapters", "engines", "errors", "faults", "resources"},
    "engines": {
        "_core",
        "adapters",
        "_version",
        "engines",
        "errors",
        "faults",
        "kernels",
        "resources",
    },
    "_core": {"_core", "adapters", "errors", "kernels"},
    "adapters": {"adapters", "errors"},
    "faults": {"errors"},
    "kernels": set(),
    "resources": {"errors"},
    "errors": set(),
    "_version": set(),
}
#: the packages of the local engine, and which of the others each may import
LOCAL = {
    "processes": set(),
    "memory": {"processes"},
    "meeting": {"processes", "memory"},
    "collectives": {"processes", "memory", "meeting"},
    "tables": {"processes", "memory", "meeting"},
    "pool": {"processes", "memory"},
    "group": {"processes", "memory", "meeting", "collectives", "tables"},
    "team": {"processes", "memory", "meeting", "collectives", "tables", "group", "pool"},
    "probes": {"processes", "memory", "meeting", "collectives"},
}
#: packages whose first page lists their modules
MAPS = (
    *(
        "_api",
        "_core",
        "adapters",
        "doctor",
        "engines",
        "engines/local",
        "engines/serial",
        "engines/mpi",
        "engines/ray",
    ),
    *(f"engines/local/{package}" for package in LOCAL if package not in ("group", "probes")),
)


def layers_used_by(path: Path) -> set[str]:
    """The layers that a file imports from, anywhere in it."""
    parts = [name.split(".") for name in imported_by(path) if name.split(".")[0] == "weft"]
    return {one[1] if len(one) > 1 and one[1] in LAYERS else "weft" for one in parts}


def imported_by(path: Path) -> set[str]:
    """What a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_point_downwards(layer: str) -> None:
    """Nothing in a layer imports from a layer above it."""
    place = SOURCE / layer
    files = place.rglob("*.py") if place.is_dir() else [SOURCE / f"{layer}.py"]
    for path in files:
        wrong = layers_used_by(path) - LAYERS[layer]
        assert not wrong, f"{path} imports from {wrong}"


def test_every_module_is_in_a_layer() -> None:
    """What is beside the layers is the public package itself."""
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__pycache__"} == set(LAYERS)


def test_only_the_registry_knows_engines() -> None:
    """Nothing outside an engine's folder imports from it, so that another can stand in its place.
    The local engine uses the serial one where there is one rank; the mpi and ray engines use the
    local one inside each host."""
    engines = [row.module.rpartition(".")[0] for row in ENGINES.values() if row.module]
    for path in SOURCE.rglob("*.py"):
        package = ".".join(("weft", *path.relative_to(SOURCE).parent.parts))
        for name in imported_by(path):
            found = {engine for engine in engines if f"{name}.".startswith(f"{engine}.")}
            found -= {one for one in engines if f"{package}.".startswith(f"{one}.")}
            found -= {"weft.engines.serial"} if "local" in package else set()
            found -= {"weft.engines.local"} if package.endswith((".mpi", ".ray")) else set()
            assert not found, f"{path} imports {name}"


@pytest.mark.parametrize("package", LOCAL)
def test_the_packages_of_the_local_engine_import_one_way(package: str) -> None:
    """As the drawing in engines/local/__init__.py has it."""
    start = "weft.engines.local."
    place = SOURCE / "engines" / "local" / package
    for path in place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
        names = [name.removeprefix(start) for name in imported_by(path) if name.startswith(start)]
        wrong = {name.split(".")[0] for name in names} - LOCAL[package] - {package}
        assert not wrong, f"{path} imports {wrong}"


def test_older_names_stand_on_top() -> None:
    """weft knows nothing of the packages with the older systems' names."""
    older = {path.name for path in SOURCE.parent.iterdir() if path.is_dir()} - {"weft"}
    assert older >= {"multiverso", "synkhronos", "playdoh", "distfun"}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & older, path


@pytest.mark.parametrize("package", MAPS)
def test_the_reading_order_has_every_module(package: str) -> None:
    """What a package's first page lists is what there is."""
    folder = SOURCE / package
    listed = re.findall(r"^(\w+\.py) ", (folder / "__init__.py").read_text(), re.MULTILINE)
    there = {path.name for path in folder.glob("[a-z]*.py")}
    assert sorted(listed) == sorted(there)


def test_core_does_not_touch_the_system() -> None:
    """_core is pure: no processes, sockets or shared memory."""
    for path in (SOURCE / "_core").glob("*.py"):
        text = path.read_text()
        for module in ("socket", "mmap", "subprocess", "ctypes", "select", "threading"):
            assert f"import {module}" not in text, f"{path} imports {module}"


def test_public_names_are_sorted_real_and_documented() -> None:
    """Every name in __all__ exists, has a docstring, and is found by dir()."""
    names = [name for name in weft.__all__ if not name.startswith("__")]
    assert names == sorted(names)
    assert set(weft._HOMES) == set(weft.__all__)
    for name in names:
        assert getattr(weft, name).__doc__, name
        assert name in dir(weft)
    with pytest.raises(AttributeError, match="no_such_name"):
        weft.no_such_name  # noqa: B018  the access is the test


def test_importing_has_no_effect() -> None:
    """import weft loads no NumPy, no engine; starts nothing; changes no environment."""
    outcome = run_python(
        """
import os, sys, threading
before = dict(os.environ)
import weft
heavy = {"numpy", "torch", "ctypes", "socket", "multiprocessing", "weft.engines"} & set(sys.modules)
print(heavy or "nothing", os.environ == before, threading.active_count())
"""
    )
    assert outcome.out == "nothing True 1\n", outcome


def test_a_plain_map_loads_no_numpy() -> None:
    """Neither the driver of a map nor its workers load it, unless the program does."""
    outcome = run_script(
        """
import sys
import weft

def loaded(_):
    return "numpy" in sys.modules

if __name__ == "__main__":
    print(weft.map(loaded, range(4), n=2), loaded(0))
"""
    )
    assert outcome.out == f"{[False] * 4} False\n", outcome


def test_every_error_is_public() -> None:
    """Whoever reads `Raises X` can write `except weft.X`."""
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    kinds = {name for name in kinds if issubclass(getattr(errors, name), errors.WeftError)}
    public = {name for name in kinds if not name.startswith("_")}
    assert public <= set(weft.__all__), public - set(weft.__all__)


def test_no_assert_and_no_exit_in_the_library() -> None:
    """Wrong input is an error of ours; only the command line ends the process."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), path
            if isinstance(node, ast.Attribute) and node.attr == "exit":
                assert path.name == "cli.py", path


@pytest.mark.timeout(600)
def test_the_wheel_in_a_bare_environment(tmp_path: Path) -> None:
    """The built wheel brings only the core dependencies, and works, launcher and all."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=True)
    environ = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    subprocess.run(
        [bare / "bin" / "pip", "install", "--quiet", wheel],
        check=True,
        capture_output=True,
        env=environ,
    )
    listed = subprocess.run(
        [bare / "bin" / "pip", "list", "--format=freeze"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    installed = {line.split("==")[0] for line in listed.split()} - {"pip", "setuptools"}
    assert installed == {"weft", "numpy", "cloudpickle", "threadpoolctl", "tqdm"}

    program = tmp_path / "program.py"
    program.write_text(
        "import numpy, weft, weft.kernels, multiverso, synkhronos, playdoh, distfun\n"
        "weft.init()\n"
        "shared = weft.share(numpy.arange(4))\n"
        "weft.barrier()\n"
        "print('sum', shared.sum(), 'of', weft.size(), weft.kernels.missing())\n"
    )
    done = subprocess.run(
        [bare / "bin" / "weft", "run", "-n", "2", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert sorted(done.stdout.splitlines()) == ["[0] sum 6 of 2 ", "[1] sum 6 of 2 "], done
    lib = bare / "lib"
    assert list(lib.rglob("weft/py.typed"))
    assert list(lib.rglob("weft/libkernels.so"))


def test_extras_are_the_ones_promised() -> None:
    """Core dependencies and extras of the installed package."""
    required = importlib.metadata.requires("weft") or []
    core = {re.split(r"[<>=]", name)[0] for name in required if "extra ==" not in name}
    assert core == {"numpy", "cloudpickle", "threadpoolctl", "tqdm"}
    extras = {"mpi", "ray", "torch", "jax", "keras", "pytensor", "all", "docs", "test", "bench"}
    assert set(importlib.metadata.metadata("weft").get_all("Provides-Extra") or ()) == extras
