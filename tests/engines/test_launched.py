"""Where a launcher put this process: the line of ancestors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import MARK, run_python
from weft.engines.launched import ancestors
from weft.engines.local.processes.linux import process_start


def test_ancestors_begin_with_the_parent() -> None:
    """Each is the parent of the one before, with the start time that tells it from a later one."""
    line = [ancestor.process for ancestor in ancestors()]
    assert line[0].pid == os.getppid()
    for child, parent in zip(line, line[1:], strict=False):
        status = Path(f"/proc/{child.pid}/status").read_text()
        assert f"PPid:\t{parent.pid}\n" in status
        assert parent.start == process_start(parent.pid)


def test_ancestors_show_what_they_were_started_with() -> None:
    """The environment is the one at the start, whatever the process has changed since."""
    code = """
import os, sys
from weft.engines.launched import ancestors
os.environ["LATER"] = "x"
if os.fork() == 0:
    parent = next(ancestors())
    print(parent.environ[sys.argv[1]], "LATER" in parent.environ)
else:
    os.wait()
"""
    assert run_python(code, MARK).out == f"{os.environ[MARK]} False\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_ancestors_of_another_user_do_not_show_it() -> None:
    """They are named all the same."""
    code = """
import os
from weft.engines.launched import ancestors
os.setuid(65534)
line = list(ancestors())
print(line[0].process.pid == os.getppid(), {ancestor.environ for ancestor in line})
"""
    assert run_python(code).out == "True {None}\n"
