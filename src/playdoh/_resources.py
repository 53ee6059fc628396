"""Workers that scripts of this machine can use one after another, and what there is of it."""

from __future__ import annotations

import os
import platform
from typing import Any

from weft._core.arguments import explain_keywords, validate_count
from weft._core.failures import warn_caller
from weft.engines import registry
from weft.errors import InvalidValue
from weft.resources import count_cores, visible_gpus

#: where Playdoh's workers listened; nothing listens here
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
    port: int | None = None,
) -> None:
    """Serve workers to the scripts of this machine, one after another or at once, as `weft open`
    does. Returns when one of them calls `shutdown(dfun)`; ends with this script.

    max_cpu     the most workers of a script; no more than there are CPUs.
    max_gpu     has no effect, and warns where there are more GPUs: each script has its own cap.
    named_pipe  True or a name, which scripts pass too: distribute(fun, named_pipe="NAME").
    port        has no effect, and warns: nothing listens on a port, as other machines come with a
                later release of weft.

    Raises LaunchError if the pipe is served already, InvalidType, InvalidValue.
    """
    cpus = MAXCPU if max_cpu is None else validate_count(max_cpu, "funworker", "max_cpu", least=1)
    if max_gpu is not None and validate_count(max_gpu, "funworker", "max_gpu", least=0) < MAXGPU:
        warn_caller(
            f"funworker(max_gpu={max_gpu}) has no effect: each script says how many of the "
            f"{MAXGPU} GPUs it uses, by distribute(fun, max_gpu={max_gpu})"
        )
    if port is not None:
        validate_port(port, "funworker")
        warn_caller(
            f"funworker(port={port}) has no effect: nothing listens on a port, and scripts of this "
            "machine use these workers by distribute(fun, named_pipe=...); other machines come "
            "with a later release of weft"
        )
    name = True if named_pipe is None or named_pipe is False else named_pipe
    engine: Any = registry.choose(None, "launch").load()
    engine.serve_pipe(name, min(cpus, MAXCPU), _say_how)


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
