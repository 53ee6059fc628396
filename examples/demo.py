"""What weft does so far, on this machine: `make demo`. Every result is checked."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def show(title: str, *command: str, code: int = 0) -> str:
    """Run a command, print what it prints, check how it ends."""
    print(f"\n== {title}\n$ {' '.join(command)}")
    program = [sys.executable, "-m", *command] if command[0] == "weft" else list(command)
    if command[0] == "python":
        program[0] = sys.executable
    done = subprocess.run(program, capture_output=True, text=True, cwd=FOLDER.parent, check=False)
    print(done.stdout, end="")
    if done.returncode != code:
        sys.exit(f"demo: exit code {done.returncode} where {code} was expected\n{done.stderr}")
    return done.stdout


def check(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"demo: FAILED: {what}")
    print(f"checked: {what}")


def main() -> None:
    out = show("one function, many items", "python", "examples/sweep.py")
    check("400 epidemics" in out, "all cores together have the known answers")

    out = show("two ranks meet", "weft", "run", "-n", "2", "examples/meet.py")
    check(all(f"I am rank {rank} of 2" in out for rank in (0, 1)), "both ranks met")

    out = show("the same program alone", "python", "examples/meet.py")
    check("I am rank 0 of 1" in out, "without a launcher it is a group of one")

    out = show(
        "gradients averaged over uneven rows", "weft", "run", "-n", "3", "examples/average.py"
    )
    check(out.count("weights [ 0.999 -2.001  0.504]") == 3, "every rank has the fit of all rows")

    out = show("an array shared with a Pool", "python", "examples/share_with_pool.py")
    check("equal to the last bit" in out, "the shared array gives the same answer")

    survive = ("weft", "run", "-n", "3", "--keep-going", "examples/survive.py")
    out = show("a rank is killed", *survive, code=128 + 9)
    check("lost rank 1" in out and "killed by SIGKILL" in out, "the others learned who and how")
    check(out.count("of 2 survivors went on") == 2, "the survivors went on")
    print("\ndemo: all checks passed")


if __name__ == "__main__":
    main()
