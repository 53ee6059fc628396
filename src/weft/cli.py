"""The command `weft`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from weft._core import arguments as numbers
from weft._core import hosts
from weft._core.hosts import Host
from weft._version import __version__
from weft.engines import registry
from weft.engines.base import Command
from weft.errors import InvalidValue, LaunchError, NoSuchPipe, WeftError

#: on one machine; more is taken for a typing error
_MOST_RANKS = 1024

_USAGE = """\
usage: weft run -n N [options] script.py [arguments]
       weft run -n N [options] -m module [arguments]
       weft run --hosts a:2,b:2 [options] script.py [arguments]
       weft open [--pipe NAME] [-n N]
       weft open --port P | --join HOST:P [--max-cpu N] [--max-gpu N] [--address A]
       weft status
       weft close [--pipe NAME]
       weft doctor [--json] [--gpu] [--hosts a,b]
       weft --version

  -n N          start N ranks of the program, which meet through weft.init()
  --hosts a:2,b:2  start 2 ranks on each of these hosts, by mpirun; -n: that many of them
  --hostfile F  read the hosts from a file with lines like `a slots=2` or `a:2`
  --gpus 0,1    let the ranks take these GPUs in turn, of those that CUDA_VISIBLE_DEVICES names
                (default: all of them); each rank sees its own alone
  --mps         let ranks that share a GPU use it at once, by a private daemon of NVIDIA's MPS; a
                rank killed inside a long kernel then takes CUDA from all others too
  --timeout T   seconds that a rank may wait for another (default: WEFT_TIMEOUT, or 1800)
  --no-prefix   do not begin each line of output with its rank
  --keep-going  let the other ranks go on when one fails (default: they are ended)

weft open keeps workers ready behind a named pipe, by default "weft", until weft close: any script
of this user gets up to N of them (default: one per core) by distribute(fun, named_pipe="NAME").
weft open --port 2718 has this machine begin a cluster, weft open --join HOST:2718 has it join one:
until weft close it takes part in distribute(fun, machines=[...]) with all its cores and GPUs, or as
many as --max-cpu and --max-gpu say. The machines need the same key; weft open tells how. --address
says at which of its addresses the others reach this machine, where the one that is found is wrong.

weft status tells which pipes are open and how busy, and what the machines of the cluster have and
do. weft close ends what weft open has started on this machine.

weft doctor tells what this machine offers to ranks and what would go wrong; its exit code is 1
where ranks cannot run. --json prints the same for programs. --gpu has two ranks measure what it
costs here to share a GPU, and tells which way their tensors go. --hosts compares the versions of
Python, weft, NumPy, mpi4py and MPI over hosts, and tells which of them cannot run ranks.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with its code, 2 for one that cannot be understood."""
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
    except SystemExit as end:  # --help and --version have printed their text
        code = end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:  # `weft run` handles Ctrl-C itself, for its ranks
        code = 128 + signal.SIGINT
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads it; the interpreter's own flush would print an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _open_missing_streams() -> None:
    """Open streams that are closed, as after `weft run ... >&-`, on /dev/null: else the next file
    that is opened would get their descriptors, and with them what is printed."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115  for good


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_USAGE, end="")
        return 2
    options, rest = _parser().parse_known_args(arguments)
    if rest:
        raise LaunchError(f"{options.prog} has no option {rest[0]!r}\n{_USAGE}")
    return int(options.run(options))


class _Parser(argparse.ArgumentParser):
    """A parser that raises LaunchError, and shows the usage of all commands at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}\n{_USAGE}")

    def format_help(self) -> str:
        return _USAGE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="weft")
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        subparser = commands.add_parser(run.__name__[1:])
        subparser.set_defaults(run=run, prog=subparser.prog)
        return subparser

    run = command(_run)
    run.add_argument("-n", type=_whole_number, dest="ranks")
    run.add_argument("--hosts")
    run.add_argument("--hostfile")
    run.add_argument("--gpus")
    run.add_argument("--mps", action="store_true")
    run.add_argument("--timeout", type=_seconds)
    run.add_argument("--no-prefix", action="store_false", dest="prefix")
    run.add_argument("--keep-going", action="store_true")
    run.add_argument("-m", nargs=argparse.REMAINDER, dest="module")
    run.add_argument("program", nargs=argparse.REMAINDER)
    opens = command(_open)
    opens.add_argument("--pipe")
    opens.add_argument("-n", type=_whole_number, dest="size")
    opens.add_argument("--port", type=_number("--port", 1))
    opens.add_argument("--join")
    opens.add_argument("--address")
    opens.add_argument("--max-cpu", type=_number("--max-cpu", 1))
    opens.add_argument("--max-gpu", type=_number("--max-gpu", 0))
    command(_status)
    command(_close).add_argument("--pipe")
    doctor = command(_doctor)
    doctor.add_argument("--json", action="store_true")
    doctor.add_argument("--gpu", action="store_true")
    doctor.add_argument("--hosts")
    doctor.add_argument("--hostfile")
    return parser


def _engine() -> Any:
    """Return the engine that launches ranks and serves pipes. Raises EngineUnavailable."""
    return registry.choose(None, "launch").load()


def _run(options: argparse.Namespace) -> int:
    # the engine first: where no ranks can run, it does not matter which
    on_hosts = options.hosts is not None or options.hostfile is not None
    engine = registry.choose("mpi", "hosts").load() if on_hosts else _engine()
    return int(engine.launch(_command(options)))


def _cluster_engine() -> Any:
    """Return the engine of other machines. Raises MissingPackage, EngineUnavailable."""
    row = registry.ENGINES["ray"]
    row.validate("weft open --port and --join use Ray between machines")
    return row.load()


def _open(options: argparse.Namespace) -> int:
    from weft.resources import count_cores

    if options.port is not None or options.join is not None:
        return _open_node(options)
    if any(one is not None for one in (options.max_cpu, options.max_gpu, options.address)):
        raise LaunchError(
            "--max-cpu, --max-gpu and --address are for other machines: weft open --port 2718 "
            "--max-cpu 4; for a pipe: weft open -n 4"
        )
    pipe = _engine().open_pipe(options.pipe or True, options.size or count_cores()[0])
    print(f"weft: the pipe {pipe!r} is open: distribute(fun, named_pipe={pipe!r})")
    return 0


def _open_node(options: argparse.Namespace) -> int:
    if options.port is not None and options.join is not None:
        raise LaunchError(
            "--port and --join were given; expected one of them: --port begins a cluster, --join "
            "HOST:PORT joins one"
        )
    if options.pipe is not None or options.size is not None:
        raise LaunchError("--pipe and -n are for pipes; for other machines: --max-cpu, --max-gpu")
    told = _cluster_engine().open_node(
        port=options.port,
        join=options.join,
        max_cpu=options.max_cpu,
        max_gpu=options.max_gpu,
        address=options.address,
    )
    print(f"weft: {told}")
    return 0


def _status(options: argparse.Namespace) -> int:
    lines = list(_engine().pipes())
    if _has_clusters():
        lines += _cluster_engine().status()
    print("\n".join(lines) or "weft: no pipe is open, and this machine is in no cluster")
    return 0


def _close(options: argparse.Namespace) -> int:
    address = ""
    if options.pipe is None and _has_clusters():
        address = _cluster_engine().close_node()
    if address:
        print(f"weft: this machine, {address}, has left its cluster")
        if not _engine().has_pipe(True):
            return 0
    elif options.pipe is None and not _engine().has_pipe(True):
        raise NoSuchPipe("this machine is in no cluster, and no pipe is open: nothing to close")
    print(f"weft: the pipe {_engine().close_pipe(options.pipe or True)!r} is closed")
    return 0


def _has_clusters() -> bool:
    """Return whether this machine can be in a cluster."""
    return not registry.ENGINES["ray"].missing()


def _doctor(options: argparse.Namespace) -> int:
    if given := _hosts(options):
        from weft.doctor.hosts import report_hosts

        return report_hosts([host.name for host in given], in_json=options.json)
    from weft.doctor.report import report

    return report(in_json=options.json, gpu=options.gpu)


def _command(options: argparse.Namespace) -> Command:
    """Return the arguments of `weft run`. All after the script or module are the program's."""
    given = _hosts(options)
    if options.ranks is None and not given:
        raise LaunchError(
            "how many ranks? -n goes before the script, for example: weft run -n 2 script.py"
        )
    program = options.program
    if options.module is not None:
        program = ["-m", *options.module]
    elif program[:1] == ["--"]:
        program = program[1:]
    numbers.from_environment(os.environ)  # one error here, not one per rank
    if given and options.gpus is not None:
        raise LaunchError(
            "--gpus names GPUs of this host; on others set CUDA_VISIBLE_DEVICES, and a rank's own "
            "is weft.device()"
        )
    if given and options.mps:
        raise LaunchError("--mps is for ranks of this host; on others start MPS there yourself")
    given = hosts.take(given, options.ranks) if given else ()
    return Command(
        ranks=sum(host.ranks for host in given) if given else options.ranks,
        program=tuple(_validate_program(program)),
        timeout=options.timeout,
        prefix=options.prefix,
        keep_going=options.keep_going,
        hosts=given,
        gpus=() if options.gpus is None else _gpus(options.gpus),
        mps=options.mps,
    )


def _gpus(text: str) -> tuple[str, ...]:
    from weft.resources import choose_gpus

    return tuple(choose_gpus(text, os.environ, f"--gpus {text}"))


def _hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    """Return the hosts of --hosts or --hostfile; none without these."""
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError("--hosts and --hostfile were given; expected one of them")
    if options.hosts is not None:
        return hosts.parse_hosts(options.hosts)
    if options.hostfile is None:
        return ()
    try:
        with open(options.hostfile, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {options.hostfile} cannot be read: {error}") from None
    return hosts.parse_hostfile(text, options.hostfile)


def _whole_number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        raise LaunchError(
            f"-n {text}: expected a whole number of ranks, 1 or more and at most {_MOST_RANKS}; "
            "for example: weft run -n 2 script.py"
        )
    return int(text)


def _number(option: str, least: int) -> Callable[[str], int]:
    """Return what parses an option's whole number."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise LaunchError(f"{option} {text}: expected a whole number, {least} or more")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        return numbers.validate_seconds(float(text), "--timeout")
    except ValueError:
        raise LaunchError(f"--timeout {text}: expected 0 or more seconds, for example 60") from None


def _validate_program(program: list[str]) -> list[str]:
    """Return the program's command line. Raises LaunchError here if it cannot be started, not once
    per rank."""
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
