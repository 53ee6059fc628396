"""Ranks learn to read digits that they draw themselves, with one table of weights.

    weft run -n 2 examples/digits_table.py          or alone: python examples/digits_table.py

In each step a rank draws some digits, takes the latest weights, and adds how they should change, at
its own pace. Together the ranks take as many steps as one alone would. At the end rank 0 prints
the share of new digits that the table gets right, which must be over 0.9. With the argument `tell`
it also tells how far it is: `make demo` makes a bar of that.
"""

import sys
import time

import numpy as np

import weft

STEPS, BATCH, RATE = 8_000, 50, 0.3
NEW, CLASSES, POINTS, NOISE = 4_000, 10, 11 * 7, 0.4
#: the digits 0 to 9, beside each other
PATTERN = """
### .#. ### ### #.# ### ### ### ### ###
#.# ##. ..# ..# #.# #.. #.. ..# #.# #.#
#.# .#. ### ### ### ### ### ..# ### ###
#.# .#. #.. ..# ..# ..# #.# ..# #.# ..#
### ### ### ### ..# ### ### ..# ### ###
"""

Array = np.ndarray


def make_shapes() -> Array:
    """The digits, ten points high and six wide."""
    lines = [line.split() for line in PATTERN.split("\n") if line]
    dots = np.array([[[dot == "#" for dot in part] for part in line] for line in lines])
    return dots.transpose(1, 0, 2).repeat(2, axis=1).repeat(2, axis=2)


SHAPES = make_shapes()


def draw_digits(rows: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Images of 11 x 7 points as rows, and which digits they show, with noise and moved about."""
    digits = generator.integers(CLASSES, size=rows)
    images = generator.normal(0, NOISE, size=(rows, 11, 7)).astype(np.float32)
    downs, rights = generator.integers(2, size=(2, rows)).tolist()
    for image, digit, down, right in zip(images, digits, downs, rights, strict=True):
        image[down : down + 10, right : right + 6] += SHAPES[digit]
    return images.reshape(rows, POINTS), digits


def read(weights: Array, images: Array) -> Array:
    """How likely each image shows each digit."""
    scores = images @ weights[:-1] + weights[-1]
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    return likely / likely.sum(axis=1, keepdims=True)


def slope(weights: Array, images: Array, digits: Array) -> Array:
    """How the mean of the rows' losses changes with each weight."""
    wrong = read(weights, images)
    wrong[np.arange(len(digits)), digits] -= 1
    return np.vstack([images.T @ wrong, wrong.sum(axis=0)]) / len(digits)


def accuracy(weights: Array, images: Array, digits: Array) -> float:
    return float((read(weights, images).argmax(axis=1) == digits).mean())


def main() -> None:
    weft.init()
    table = weft.MatrixTable(POINTS + 1, CLASSES, updater=weft.updaters.sgd(lr=RATE))
    generator = np.random.default_rng(weft.rank())
    own_steps = STEPS // weft.size()

    weft.barrier()
    began = time.perf_counter()
    for step in range(own_steps):
        if step % (own_steps // 20) == 0 and weft.is_master() and "tell" in sys.argv:
            print(f"step {step} of {own_steps}", flush=True)
        table.add(slope(table.get(), *draw_digits(BATCH, generator)))
    weft.barrier()
    seconds = time.perf_counter() - began

    if weft.is_master():
        right = accuracy(table.get(), *draw_digits(NEW, np.random.default_rng(10**6)))
        assert right > 0.9, right
        ranks = "1 rank" if weft.size() == 1 else f"{weft.size()} ranks"
        print(f"{ranks}: {right:.3f} of {NEW:,} digits are right after {seconds:.2f} s")


if __name__ == "__main__":
    main()
