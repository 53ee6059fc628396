"""How every benchmark begins and ends: its options, and what becomes of the lines it found."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import comparison
from comparison import Line, Results


def options(
    document: str | None,
    *,
    rounds: int,
    quick_rounds: int,
    peers: Iterable[str] = (),
    roles: Iterable[str] = (),
    flags: Iterable[str] = (),
    choices: Mapping[str, Sequence[str]] | None = None,
    seconds: float | None = None,
) -> argparse.Namespace:
    """What the user asks for: quick, rounds, peers and results, of `choices` one each, by default
    the first, and how many `seconds` it may take, if it can be told; or, where a benchmark has
    started itself again, role and place, and the flags that it gave itself."""
    known = list(peers)
    parser = argparse.ArgumentParser(description=(document or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"rounds: {quick_rounds}, less each")
    parser.add_argument("--rounds", type=int, help=f"how often all is measured (default: {rounds})")
    parser.add_argument(
        "--results",
        type=Path,
        default=comparison.RESULTS,
        help="the folder to write to (default: benchmarks/results)",
    )
    if known:
        parser.add_argument("--peers", default=",".join(known), help="which (default: %(default)s)")
    for name, values in (choices or {}).items():
        told = f"one of {', '.join(values)} (default: {values[0]})"
        parser.add_argument(f"--{name}", choices=values, default=values[0], help=told)
    if seconds is not None:
        told = "begin nothing after so many (default: %(default)s)"
        parser.add_argument("--seconds", type=float, default=seconds, help=told)
    for flag in flags:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=list(roles), help=argparse.SUPPRESS)
    parser.add_argument("place", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if known:
        given.peers = given.peers.split(",")
        if unknown := set(given.peers) - set(known):
            parser.error(f"--peers {','.join(sorted(unknown))}: known are {','.join(known)}")
    if given.rounds is None:
        given.rounds = quick_rounds if given.quick else rounds
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: expected 1 or more")
    return given


def finish(
    name: str,
    lines: Sequence[Line],
    given: argparse.Namespace,
    *,
    packages: Iterable[str],
    skipped: Sequence[str] = (),
    machine: Mapping[str, Any] | None = None,
) -> None:
    """Print the lines, and keep them."""
    print(comparison.table(lines))
    for line in skipped:
        print(f"skipped: {line}")
    keep(name, lines, given, packages=packages, skipped=skipped, machine=machine)


def keep(
    name: str,
    lines: Sequence[Line],
    given: argparse.Namespace,
    *,
    packages: Iterable[str],
    skipped: Sequence[str] = (),
    machine: Mapping[str, Any] | None = None,
) -> None:
    """Keep the lines with the date, the machine and the packages' versions. `machine` is what a
    benchmark knows of it besides."""
    results = Results(
        lines=lines,
        date=comparison.now(),
        machine={**comparison.this_machine(), **(machine or {})},
        versions=comparison.versions(["weft", "numpy", *packages]),
        quick=given.quick,
        skipped=skipped,
    )
    comparison.save(given.results / f"{name}.json", results)
