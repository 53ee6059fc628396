"""Workers that scripts can use one after another, and what there is of this machine."""

from __future__ import annotations

import os
import platform
from typing import Any

from weft._core.arguments import explain_keywords, validate_count
from weft._core.failures import warn_caller
from weft.engines import registry
from weft.errors import InvalidType, InvalidValue
from weft.resources import count_cores, visible_gpus

#: where machines reach each other's workers, unless another port is given
DEFAULT_PORT = 2718
_LAST_PORT = 65535


def get_cpu_count() -> int:
    """Return how many CPUs this process may use."""
    return count_cores()[0]


def get_gpu_count() -> int:
    """Return how many GPUs this process may use."""
    return len(visible_gpus(os.environ))


#: the CPUs and GPUs of this machine, and whether there are GPUs, when this was imported
MAXCPU = get_cpu_count()
MAXGPU = get_gpu_count()
CANUSEGPU = MAXGPU > 0


@explain_keywords
def funworker(
    max_cpu: int | None = None,
    max_gpu: int | None = None,
    named_pipe: bool | str | None = None,
    port: int | str | None = None,
) -> None:
    """Serve workers to scripts, one after another or at once, as `weft open` does: with a port to
    those of other machines, else to those of this one, behind a named pipe. Returns when one of
    them calls `shutdown(dfun)`, or after `weft close`; ends with this script.

    max_cpu     the most workers of a script; no more than there are CPUs.
    max_gpu     the most GPUs that this machine gives to others; with a pipe it has no effect, and
                warns where there are more: each script has its own cap.
    named_pipe  True or a name, which scripts pass too: distribute(fun, named_pipe="NAME").
    port        the port of the cluster that this machine begins; or "HOST:2718", to join that which
                another machine has begun. Scripts pass distribute(fun, machines=[...]). With a
                pipe it has no effect, and warns.

    Raises LaunchError if the pipe is served already, a port is in use, or this machine is in a
    cluster; MachineUnavailable if it cannot join; MissingPackage without Ray; InvalidType,
    InvalidValue.
    """
    cpus = MAXCPU if max_cpu is None else validate_count(max_cpu, "funworker", "max_cpu", least=1)
    if max_gpu is not None:
        validate_count(max_gpu, "funworker", "max_gpu", least=0)
    if isinstance(port, str) and port.isdecimal():
        raise InvalidType(
            f"funworker(port={port!r}): expected a number, port={port}, to begin a cluster, or a "
            f"machine to join, port='HOST:{port}'"
        )
    if port is not None and not isinstance(port, str):
        validate_port(port, "funworker")
    has_pipe = named_pipe is not None and named_pipe is not False
    if port is not None and not has_pipe:
        _serve_machines(port, max_cpu, max_gpu)
        return
    if port is not None:
        warn_caller(
            f"funworker(port={port!r}) has no effect: with named_pipe={named_pipe!r} it serves "
            "scripts of this machine; leave that out to serve those of other machines"
        )
    if max_gpu is not None and max_gpu < MAXGPU:
        warn_caller(
            f"funworker(max_gpu={max_gpu}) has no effect: each script says how many of the "
            f"{MAXGPU} GPUs it uses, by distribute(fun, max_gpu={max_gpu})"
        )
    engine: Any = registry.choose(None, "launch").load()
    engine.serve_pipe(named_pipe if has_pipe else True, min(cpus, MAXCPU), _say_how)


def _serve_machines(port: int | str, max_cpu: int | None, max_gpu: int | None) -> None:
    """Serve workers to the scripts of other machines."""
    row = registry.ENGINES["ray"]
    row.validate(f"funworker(port={port!r}) uses Ray between machines")
    engine: Any = row.load()
    engine.serve_node(
        port=None if isinstance(port, str) else port,
        join=port if isinstance(port, str) else None,
        max_cpu=max_cpu,
        max_gpu=max_gpu,
        opened=lambda told: print(f"playdoh: {told}", flush=True),
    )


def _say_how(pipe: str) -> None:
    print(
        f"playdoh: waiting for scripts of this machine: distribute(fun, named_pipe={pipe!r})",
        flush=True,
    )


def validate_port(port: object, where: str) -> None:
    """Raise InvalidType, InvalidValue for anything but a port's number."""
    if validate_count(port, where, "port", least=1) > _LAST_PORT:
        raise InvalidValue(f"{where}(port={port}): expected a port, 1 to {_LAST_PORT}")


def elsewhere(machines: Any) -> list[Any]:
    """Return the machines but this one, which takes part in any case."""
    listed = machines if isinstance(machines, (list, tuple)) else [machines]
    return [machine for machine in listed if machine is not None and not _is_here(machine)]


def _is_here(machine: object) -> bool:
    """Return whether a name, or a pair of a name and a port, is this machine's."""
    name = machine[0] if isinstance(machine, tuple) and machine else machine
    return name in ("localhost", "127.0.0.1", platform.node())
