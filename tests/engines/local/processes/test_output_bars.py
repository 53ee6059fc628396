"""What workers print and log while bars are shown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import HANGS

PROGRAM = """
import logging, sys, weft
from tqdm import tqdm

how, whose = sys.argv[1:]

def function(item):
    if how == "print":
        print(f"this is item {item}")
    else:
        logging.warning("this is item %d", item)

logging.basicConfig(format="%(message)s")
if whose == "weft's":
    weft.map(function, range(20), n=2, progress="working")
else:
    for _ in tqdm(weft.map_async(function, range(20), n=2).results(), total=20):
        pass
"""


@pytest.mark.parametrize("whose", ["weft's", "the user's"])
@pytest.mark.parametrize("how", ["print", "log"])
def test_lines_and_bars_are_not_mixed(how: str, whose: str) -> None:
    """Each line of a worker is one on the terminal, and the bar is below them."""
    outcome = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, whose],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANGS,
        check=True,
    )
    lines = [on_terminal(line) for line in outcome.stdout.decode().split("\n")]
    assert sorted(line for line in lines if "item" in line) == sorted(
        f"this is item {item}" for item in range(20)
    )
    assert "20/20" in lines[-2]


def on_terminal(line: str) -> str:
    """What is seen of it: a carriage return goes back to its beginning."""
    seen = ""
    for text in line.split("\r"):
        seen = text + seen[len(text) :]
    return seen.rstrip()
