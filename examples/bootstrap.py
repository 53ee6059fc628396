"""A bootstrap over 400 MB that all workers read and none has a copy of.

    python examples/bootstrap.py

How much does each value of a long series depend on the one before, and how sure is that? Each
replicate draws blocks of the series, with replacement, and estimates it anew; the spread of the
estimates is the answer's error. The series goes to the workers as `shared_data`: they see it
where it lies. Each replicate tells how much memory its worker has of its own.
"""

import os
from pathlib import Path

import numpy as np

import weft

LENGTH, BLOCK, REPLICATES = 50_000_000, 50_000, 30


def make_series() -> np.ndarray:
    """A moving average of noise: neighbours are correlated by exactly 0.4."""
    series = np.empty(LENGTH)
    generator, last = np.random.default_rng(7), 0.0
    for block in series.reshape(-1, BLOCK):
        noise = generator.standard_normal(BLOCK)
        block[0] = noise[0] + 0.5 * last
        block[1:] = noise[1:] + 0.5 * noise[:-1]
        last = noise[-1]
    return series


def replicate(_: int, shared_data: dict[str, np.ndarray]) -> tuple[float, int, int]:
    """The correlation in a series of drawn blocks; who computed it, and with how much memory."""
    blocks = shared_data["series"].reshape(-1, BLOCK)
    products = squares = 0.0
    for number in np.random.randint(len(blocks), size=len(blocks)):
        block = blocks[number]
        products += block[1:] @ block[:-1]
        squares += block[1:] @ block[1:]
    return products / squares, os.getpid(), own_memory()


def own_memory() -> int:
    """Bytes of this process that no other sees."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))


def main() -> None:
    series = make_series()
    with weft.distribute(replicate, shared_data={"series": series}, seed=1, progress=True) as draw:
        found = draw(range(REPLICATES))

    estimates = np.array([estimate for estimate, _, _ in found])
    mean, error = estimates.mean(), estimates.std(ddof=1)
    assert error < 1e-3, error
    assert abs(mean - 0.4) < 4 * error, (mean, error)
    workers = {pid for _, pid, _ in found}
    most = max(memory for _, _, memory in found)
    assert most < series.nbytes / 4, f"a worker has {most} bytes of its own"
    print(
        f"correlation {mean:.5f} +- {error:.5f}; {len(workers)} workers with at most "
        f"{most / 1e6:.0f} MB of their own read {series.nbytes / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
