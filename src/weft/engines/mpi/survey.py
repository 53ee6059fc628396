"""Ask hosts what they have, all at the same time, over ssh or what mpirun was told to use for it.

this host ── ssh a python -  <  QUESTION   prints JSON
          ── ssh b python -  <  QUESTION
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from weft._core.survey import Answer
from weft._version import __version__

#: seconds for a host to answer
_ANSWER = 20.0
#: what precedes the answer, as a login shell may print something first
_BEGINS = "weft answers: "
#: how ssh ends when it has not reached a host, and a shell when there is no such program
_UNREACHED, _NO_PROGRAM = 255, (126, 127)

#: a program that a host runs: folder, script and whether to load MPI are its arguments
_QUESTION = """
import importlib.metadata, json, os, platform, socket, subprocess, sys
folder, script, full = sys.argv[1:]
facts = {"name": socket.gethostname(), "python": platform.python_version()}
refusal = ""
try:
    os.chdir(folder)
    if script and not os.path.exists(script):
        refusal = f"there is no script {script!r} in {folder}"
except OSError as error:
    refusal = f"there is no folder {folder!r} ({error.strerror})"
if refusal:
    refusal += "; the hosts need the same files at the same place, as on a shared file system"
def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
try:
    import weft._version
    facts["weft"] = weft._version.__version__
except ImportError:
    facts["weft"] = ""
for package in ("numpy", "mpi4py"):
    facts[package] = version(package)
if full == "full":
    load = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI;"
        "words = MPI.Get_library_version().split(',')[0].splitlines()[0];"
        "print(*words.replace('Version:', '').split())"
    )
    facts["mpi"] = subprocess.run(
        [sys.executable, "-c", load], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()
def link(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""
try:
    boot = open("/proc/sys/kernel/random/boot_id").read().strip()
except OSError:
    boot = ""
identity = [boot, link("/proc/self/ns/pid"), link("/proc/self/ns/net")]
print("BEGINS" + json.dumps({"refusal": refusal, "facts": facts, "identity": identity}))
"""


def ask(hosts: Sequence[str], *, script: str = "", full: bool = False) -> list[Answer]:
    """Return what each host answered within some seconds, in the order of `hosts`. `script` must be
    there, in a folder with the path of this process's; `full` asks for the MPI library, too."""
    line = [sys.executable, "-", os.getcwd(), script, "full" if full else ""]
    if path := os.environ.get("PYTHONPATH"):  # ranks get it, too
        line = ["env", f"PYTHONPATH={path}", *line]
    question = _QUESTION.replace("BEGINS", _BEGINS).encode()
    with contextlib.ExitStack() as stack:
        asked = [stack.enter_context(_Asked(host, line, question)) for host in hosts]
        _wait(asked)
        return [one.answer() for one in asked]


def remote_shell(environ: Mapping[str, str]) -> list[str]:
    """Return the command that runs a program on a host: what mpirun was told to use, or ssh."""
    for name in ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC"):
        if words := shlex.split(environ.get(name, "").partition(":")[0]):
            return words
    # no questions: there may be nobody to answer, and several hosts would ask at once
    return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]


def is_here(host: str) -> bool:
    """Return whether a name or an address is this host's, which needs no ssh."""
    if host in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)  # possible for addresses of this host only
    except (OSError, UnicodeError):
        return False
    return True


class _Asked:
    """A host that was asked, and has not answered yet."""

    def __init__(self, host: str, line: Sequence[str], question: bytes) -> None:
        self.host = host
        self.late = False
        if is_here(host):
            command = list(line)
        else:
            command = [*remote_shell(os.environ), host, shlex.join(line)]
        # files, as what a host starts may hold a pipe for longer than it answers
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as given:
            given.write(question)
            given.seek(0)
            try:
                self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    command, stdin=given, stdout=self._out, stderr=self._err, start_new_session=True
                )
                self._failure = ""
            except OSError as error:
                self.process = None
                self._failure = f"{command[0]} cannot be run here: {error.strerror}"

    def __enter__(self) -> _Asked:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._out.close()
        self._err.close()

    def answer(self) -> Answer:
        """Return what it said, or why it said nothing."""
        if self.process is None:
            return Answer(self.host, self._failure)
        out, err = (_read(file.fileno()) for file in (self._out, self._err))
        for line in out.splitlines():
            if line.startswith(_BEGINS):
                said = json.loads(line.removeprefix(_BEGINS))
                facts, refusal = said["facts"], said["refusal"]
                lacking = [name for name in ("weft", "mpi4py") if not facts[name]]
                if lacking:
                    refusal = (
                        f"has no {' and no '.join(lacking)} for {sys.executable}; on that host:\n"
                        f"    {sys.executable} -m pip install 'weft[mpi]=={__version__}'"
                    )
                return Answer(self.host, refusal, facts, " ".join(said["identity"]))
        return Answer(self.host, self._refusal(" ".join(err.split())[-300:]))

    def _refusal(self, words: str) -> str:
        if self.late:
            return f"did not answer within {_ANSWER:g} s {words}".rstrip()
        code = None if self.process is None else self.process.returncode
        if code == _UNREACHED:
            hint = "; log in without a password first: ssh-copy-id" if "denied" in words else ""
            return f"cannot be reached: {words or 'ssh says no more'}{hint}"
        if code in _NO_PROGRAM or "No such file" in words:
            return (
                f"has no Python at {sys.executable} ({words}); the hosts need the same environment "
                "at the same place, as on a shared file system"
            )
        return f"ended with exit code {code} instead of an answer: {words}"


def _wait(asked: Sequence[_Asked]) -> None:
    """Wait until all have answered, or until the time is over for those that have not."""
    until = time.monotonic() + _ANSWER
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for one in asked:
            if one.process is not None:
                pidfd = os.pidfd_open(one.process.pid)
                stack.callback(os.close, pidfd)
                selector.register(pidfd, selectors.EVENT_READ, one)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                key.data.process.wait()
                selector.unregister(key.fd)
        for key in selector.get_map().values():
            key.data.late = True


def _read(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode(errors="replace")
