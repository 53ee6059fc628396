"""The command line: what each wrong command gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import HANGS, run_python
from weft import __version__, cli
from weft._core.hosts import Host
from weft.engines.base import Command
from weft.errors import LaunchError


def weft(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        capture_output=True,
        text=True,
        timeout=HANGS,
        cwd=cwd,
    )


def parse_run(arguments: list[str]) -> Command:
    return cli._command(cli._parser().parse_args(["run", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "-n", "0", "ok.py"], "-n 0: expected a whole number of ranks, 1 or more"),
        (["run", "-n", "-2", "ok.py"], "-n -2: expected a whole number"),
        (["run", "-n", "x", "ok.py"], "-n x: expected a whole number"),
        (["run", "-n", "1.5", "ok.py"], "-n 1.5: expected a whole number"),
        (["run", "-n"], "argument -n: expected one argument\nusage: weft run -n N"),
        (
            ["run", "-n", "100000", "ok.py"],
            "-n 100000: expected a whole number of ranks, 1 or more",
        ),
        (["run", "ok.py"], "how many ranks? -n goes before the script, for example: weft run -n 2"),
        (["run", "-n", "2"], "no script was given; for example: weft run -n 2 script.py"),
        (["run", "-n", "2", "-m"], "no module was given"),
        (["run", "-n", "2", "missing.py"], "there is no script 'missing.py' in"),
        (["run", "-n", "2", "broken.py"], "'broken.py' does not parse: line 2"),
        (["run", "-n", "2", "folder"], "'folder' is a folder without a __main__.py"),
        (["run", "-n", "2", "--timeout", "-1", "ok.py"], "--timeout -1: expected 0 or more"),
        (["run", "-n", "2", "--timeout", "soon", "ok.py"], "--timeout soon: expected 0 or more"),
        (["run", "-n", "2", "--fast", "ok.py"], "weft run has no option '--fast'"),
        (["run", "-n", "2", "--gpus", "99", "ok.py"], "--gpus 99: "),  # none is seen, or others
        (["run", "-n", "2", "--gpus", "0,", "ok.py"], "--gpus 0,: expected names of GPUs"),
        (["run", "--hosts", "a", "--mps", "ok.py"], "--mps is for ranks of this host"),
        (["run", "--hosts", "a", "--gpus", "0", "ok.py"], "--gpus names GPUs of this host"),
        (["run", "--hosts", "a:0", "ok.py"], "--hosts a:0: 'a:0' is no host with a number"),
        (["run", "--hosts", "a:2,b:1", "-n", "4", "ok.py"], "-n 4: the hosts take 3 ranks (a:2,"),
        (["run", "--hostfile", "wrong", "ok.py"], "--hostfile wrong, line 2: 'b slosts=2' is no"),
        (["run", "--hostfile", "none", "ok.py"], "--hostfile none cannot be read: [Errno 2]"),
        (["run", "--hosts", "a", "--hostfile", "f", "ok.py"], "expected one of them"),
        (["run", "--hosts", "a:2"], "no script was given"),
        (["doctor", "--hosts", "a b"], "'a b' is no host with a number"),
        (["open", "--port", "0"], "--port 0: expected a whole number, 1 or more"),
        (["open", "--port", "x"], "--port x: expected a whole number"),
        (["open", "--port", "65530"], "port 65530: expected 1 to 65476, as the ports of"),
        (["open", "--port", "2718", "--max-cpu", "0"], "--max-cpu 0: expected a whole number, 1"),
        (["open", "--port", "2718", "--max-gpu", "-1"], "--max-gpu -1: expected a whole number"),
        (["open", "--port", "2718", "--join", "a"], "--port and --join were given; expected one"),
        (["open", "--port", "2718", "--pipe", "a"], "--pipe and -n are for pipes; for other"),
        (["open", "--max-cpu", "2"], "--max-cpu, --max-gpu and --address are for other machines"),
        (["open", "--port", "2718", "--address", "192.0.2.1"], "--address 192.0.2.1: expected an"),
        (["open", "--join", "a:b"], "'a:b': expected HOST:PORT, for example bob:2718"),
        (["open", "--join", ":1"], "':1': expected HOST:PORT, for example bob:2718"),
        (["walk"], "invalid choice: 'walk' (choose from"),
        (["doctor", "--xml"], "weft doctor has no option '--xml'"),
        (["doctor", "--json", "now"], "weft doctor has no option 'now'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_commands(arguments: list[str], told: str, tmp_path: Path) -> None:
    """One line that names the value, what was expected and the next step; exit code 2."""
    (tmp_path / "ok.py").write_text("print('ran')")
    (tmp_path / "broken.py").write_text("print('ran')\nif:\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "wrong").write_text("a slots=2\nb slosts=2\n")
    done = weft(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert "ran" not in done.stdout


@pytest.mark.parametrize(
    ("hidden", "told"),
    [
        ("importlib.util.find_spec = lambda *_: None", "It needs the package ray, which is not"),
        ("importlib.metadata.version = lambda _: '2.9.3'", "Ray 2.9.3 is installed, and 2.56"),
    ],
)
def test_a_machine_without_ray(hidden: str, told: str) -> None:
    """Or with one that is too old: the pip line is printed; what needs none works."""
    program = f"""
import importlib.metadata, importlib.util, sys
from weft import cli
{hidden}
cli.main(sys.argv[1:])
"""
    done = run_python(program, "open", "--port", "2718")
    assert done.code == 1
    assert told in done.err
    assert "pip install 'weft[ray]'" in done.err
    assert "Traceback" not in done.err
    status = run_python(program, "status")
    assert (status.code, status.err) == (0, ""), status


def test_help_and_version() -> None:
    """The usage is printed when asked for, and on an empty command."""
    assert weft("--version").stdout == f"weft {__version__}\n"
    for arguments in (["--help"], ["run", "--help"], ["doctor", "--help"], []):
        done = weft(*arguments)
        assert done.returncode == (0 if arguments else 2)
        assert "usage: weft run -n N" in done.stdout
        assert "weft doctor [--json] [--gpu] [--hosts a,b]" in done.stdout
        assert "weft run --hosts a:2,b:2" in done.stdout
        assert "weft open --port P | --join HOST:P" in done.stdout


def test_options_in_every_spelling(tmp_path: Path) -> None:
    """-n 2, -n2, -n=2; --timeout 5, --timeout=5."""
    script = tmp_path / "s.py"
    script.write_text("")
    for spelling in (["-n", "2"], ["-n2"], ["-n=2"]):
        assert parse_run([*spelling, str(script)]).ranks == 2
    for spelling in (["--timeout", "5"], ["--timeout=5"]):
        parsed = parse_run(["-n", "1", *spelling, "--no-prefix", str(script), "-n", "9"])
        assert (parsed.timeout, parsed.prefix) == (5.0, False)
        assert parsed.program == (str(script), "-n", "9")
    assert parse_run(["-n", "2", "--", str(script)]).program == (str(script),)


def test_hosts_and_their_ranks(tmp_path: Path) -> None:
    """All ranks of the hosts, or as many as -n says; from a file, too."""
    script, file = tmp_path / "s.py", tmp_path / "hosts"
    script.write_text("")
    file.write_text("a slots=2\nb\n")
    for spelling in (["--hosts", "a:2,b"], ["--hosts=a:2,b"], ["--hostfile", str(file)]):
        parsed = parse_run([*spelling, str(script), "--hosts", "c"])
        assert (parsed.ranks, parsed.hosts) == (3, (Host("a", 2), Host("b", 1)))
        assert parsed.program == (str(script), "--hosts", "c")
    assert parse_run(["--hosts", "a:2,b", "-n", "1", str(script)]).hosts == (Host("a", 1),)
    assert parse_run(["-n", "1", str(script)]).hosts == ()


def test_a_wrong_timeout_in_the_environment_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WEFT_TIMEOUT is checked before ranks are started."""
    (tmp_path / "ok.py").write_text("print('ran')")
    monkeypatch.setenv("WEFT_TIMEOUT", "-1")
    done = weft("run", "-n", "2", str(tmp_path / "ok.py"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "WEFT_TIMEOUT='-1': expected 0 or more seconds, or inf" in done.stderr


def test_a_folder_with_a_main_runs(tmp_path: Path) -> None:
    """What `python FOLDER` runs, `weft run` runs."""
    (tmp_path / "__main__.py").write_text("print('main')")
    done = weft("run", "-n", "1", "--no-prefix", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "main\n")


def test_an_unreadable_script_is_refused(tmp_path: Path) -> None:
    """A script with bytes that are no source is one error, not one per rank."""
    (tmp_path / "binary.py").write_bytes(b"\x00\xff\x00")
    with pytest.raises(LaunchError, match="does not parse"):
        parse_run(["-n", "2", str(tmp_path / "binary.py")])


def test_python_before_the_script_is_a_slip() -> None:
    """`weft run -n 2 python train.py` says to leave `python` away."""
    with pytest.raises(LaunchError, match=r"there is no script 'python'.*leave it away"):
        parse_run(["-n", "2", "python", "train.py"])
