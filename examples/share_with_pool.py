"""A shared array in an ordinary multiprocessing.Pool: it travels as a reference, not as bytes."""

import multiprocessing
import time
from multiprocessing.pool import Pool

import numpy as np
from numpy.typing import NDArray

import weft

Floats = NDArray[np.float64]


def total(part: Floats) -> float:
    return float(part.sum())


def timed_map(pool: Pool, array: Floats) -> tuple[float, float]:
    began = time.perf_counter()
    half = len(array) // 2
    result = sum(pool.map(total, [array[:half], array[half:]]))
    return result, time.perf_counter() - began


def main() -> None:
    plain = np.random.default_rng(0).random(12_500_000)
    shared = weft.share(plain)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(total, [shared[:1], shared[:1]])  # the workers have started
        expected, by_value = timed_map(pool, plain)
        found, by_reference = timed_map(pool, shared)
    print(f"100 MB to a Pool: {by_value * 1e3:.0f} ms by value, {by_reference * 1e3:.0f} ms shared")
    assert found == expected, (found, expected)
    print("both sums are equal to the last bit")


if __name__ == "__main__":
    main()
