"""The command `weft`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from weft._core import timeouts
from weft._version import __version__
from weft.errors import InvalidValue, LaunchError, WeftError

if TYPE_CHECKING:
    from weft.engines.local.launcher import Command

#: on one machine; more is a slip of the finger
_MOST_RANKS = 1024

_USAGE = """\
usage: weft run -n N [options] script.py [arguments]
       weft run -n N [options] -m module [arguments]
       weft open [--pipe NAME] [-n N]
       weft status
       weft close [--pipe NAME]
       weft doctor [--json]
       weft --version

  -n N          start N ranks of the program, which meet through weft.init()
  --timeout T   seconds that a rank may wait for another (default: WEFT_TIMEOUT, or 1800)
  --no-prefix   do not begin each line of output with its rank
  --keep-going  let the other ranks go on when one fails (default: they are ended)

weft open keeps workers ready behind a named pipe, by default "weft", until weft close: any script
of this user gets up to N of them (default: one per core) by distribute(fun, named_pipe="NAME").
weft status tells which pipes are open and how busy.

weft doctor tells what this machine offers to ranks and what would go wrong; its exit code is 1
where ranks cannot run. --json prints the same for programs.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; exits with its code, 2 for a command that makes no sense."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_missing_streams()
    try:
        code = _dispatch(list(arguments))
    except (LaunchError, InvalidValue) as error:
        print(f"weft: {error}", file=sys.stderr)
        code = 2
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:  # `weft run` takes Ctrl-C itself, for its ranks
        code = 128 + signal.SIGINT
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads it; the interpreter would complain when it tries again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _open_missing_streams() -> None:
    """After `weft run ... >&-` there is no stdout: print into nothing, rather than into whatever
    file gets its descriptor."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115  for good


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(_USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"weft {__version__}")
        return 0
    command = _COMMANDS.get(arguments[0])
    if command is None:
        known = ", ".join(_COMMANDS)
        raise LaunchError(f"there is no command {arguments[0]!r}; known are: {known}\n{_USAGE}")
    if arguments[1:2] in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return 0
    return command(arguments[1:])


def _run(arguments: list[str]) -> int:
    # imported here: `weft --version` needs none of it
    from weft.engines.local.system import check_system

    check_system()  # first: elsewhere the rest cannot even be loaded
    from weft.engines.local.launcher import run

    return run(parse_run(arguments))


def _doctor(arguments: list[str]) -> int:
    for option in arguments:
        if option != "--json":
            raise LaunchError(f"weft doctor has no option {option!r}\n{_USAGE}")
    from weft import doctor

    return doctor.report(as_json=bool(arguments))


def _open(arguments: list[str]) -> int:
    from weft.engines.local.system import check_system

    check_system()
    from weft.engines.local import named
    from weft.resources import count_cores

    options = _named_options("open", arguments, "--pipe", "-n")
    size = _whole_number(options["-n"]) if "-n" in options else count_cores()[0]
    pipe = named.check_name(options.get("--pipe", True))
    named.open_pipe(pipe, size)
    print(f"weft: the pipe {pipe!r} is open: distribute(fun, named_pipe={pipe!r})")
    return 0


def _status(arguments: list[str]) -> int:
    from weft.engines.local import named

    _named_options("status", arguments)
    served = named.names()
    if not served:
        print("weft: no pipe is open")
    for pipe in served:
        try:
            channel, pool = named.connect(pipe)
        except WeftError as error:
            print(f"{pipe}: {error}")
            continue
        channel.close()
        print(
            f"{pipe}: pid {pool.pid}, {pool.drivers} scripts have {pool.workers} workers, "
            f"up to {pool.size} each"
        )
    return 0


def _close(arguments: list[str]) -> int:
    from weft.engines.local import named

    pipe = named.check_name(_named_options("close", arguments, "--pipe").get("--pipe", True))
    named.close_pipe(pipe)
    print(f"weft: the pipe {pipe!r} is closed")
    return 0


def _named_options(command: str, arguments: list[str], *known: str) -> dict[str, str]:
    """Options that all have a value, as `--name value` or `--name=value`."""
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in known:
            raise LaunchError(f"weft {command} has no option {name!r}\n{_USAGE}")
        if not equals and not rest:
            raise LaunchError(f"weft {command}: {name} needs a value\n{_USAGE}")
        found[name] = value if equals else rest.pop(0)
    return found


_COMMANDS = {"run": _run, "open": _open, "status": _status, "close": _close, "doctor": _doctor}


def parse_run(arguments: Sequence[str]) -> Command:
    """What `weft run` was asked for. Everything after the script or module is the program's."""
    from weft.engines.local.launcher import Command

    ranks: int | None = None
    timeout: float | None = None
    prefix, keep_going = True, False
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--"):
        option = rest.pop(0)
        name, equals, value = option.partition("=")
        if name == "--no-prefix":
            prefix = False
        elif name == "--keep-going":
            keep_going = True
        elif name in ("-n", "--timeout"):
            if not equals:
                if not rest:
                    raise LaunchError(f"{name} needs a value, for example: weft run -n 2 script.py")
                value = rest.pop(0)
            if name == "-n":
                ranks = _whole_number(value)
            else:
                timeout = _seconds(value)
        elif option[:2] == "-n" and option[2:].isdigit():
            ranks = _whole_number(option[2:])
        else:
            raise LaunchError(f"weft run has no option {option!r}\n{_USAGE}")
    if ranks is None:
        raise LaunchError(
            "how many ranks? -n goes before the script, for example: weft run -n 2 script.py"
        )
    if rest[:1] == ["--"]:
        rest.pop(0)
    timeouts.from_environment(os.environ)  # one error here, not one per rank
    return Command(
        ranks=ranks,
        program=tuple(_checked_program(rest)),
        timeout=timeout,
        prefix=prefix,
        keep_going=keep_going,
    )


def _whole_number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        raise LaunchError(
            f"-n {text}: expected a whole number of ranks, 1 or more and at most {_MOST_RANKS}; "
            "for example: weft run -n 2 script.py"
        )
    return int(text)


def _seconds(text: str) -> float:
    try:
        return timeouts.checked(float(text), "--timeout")
    except ValueError:
        raise LaunchError(f"--timeout {text}: expected 0 or more seconds, for example 60") from None


def _checked_program(program: list[str]) -> list[str]:
    """The program's command line, if it can be started at all: one error here, not one per rank."""
    if not program or program == ["-m"]:
        what = "module" if program else "script"
        raise LaunchError(f"no {what} was given; for example: weft run -n 2 script.py")
    if program[0] == "-m":
        return program
    script = program[0]
    if not os.path.exists(script):
        hint = "; leave it away, the script comes first" if script.startswith("python") else ""
        raise LaunchError(f"there is no script {script!r} in {os.getcwd()}{hint}")
    if os.path.isdir(script):
        if not os.path.exists(os.path.join(script, "__main__.py")):
            raise LaunchError(f"{script!r} is a folder without a __main__.py; name a script in it")
        return program
    try:
        with open(script, "rb") as file:
            compile(file.read(), script, "exec", dont_inherit=True)
    except OSError as error:
        raise LaunchError(f"the script {script!r} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else "it is not Python source: "
        raise LaunchError(f"the script {script!r} does not parse: {where}{error}") from None
    return program
