"""Least squares over 2,000,000 rows that lie in shared memory, by a function of all cores.

    python examples/least_squares.py

The rows are shared once. `moments(x, y)` has each rank work through its rows in slices and adds up
what they find: a few hundred numbers, however many rows there are. Only references to the arrays
travel. The solution, a fit to some of the rows and the residuals must be NumPy's own.
"""

import numpy as np

import weft

ROWS, COLUMNS, RANKS = 2_000_000, 12, 2

Array = np.ndarray


def products(x: Array, y: Array) -> tuple[Array, Array]:
    """The two sums over rows that least squares needs."""
    return x.T @ x, x.T @ y


def squared_error(x: Array, y: Array, solution: Array) -> float:
    """A mean over rows."""
    return float(np.mean((x @ solution - y) ** 2))


def main() -> None:
    generator = np.random.default_rng(4)
    x = weft.share(generator.standard_normal((ROWS, COLUMNS), dtype=np.float32))
    truth = np.arange(COLUMNS, dtype=np.float32)
    y = weft.share(x @ truth + generator.standard_normal(ROWS, dtype=np.float32))

    with weft.Team(RANKS) as team:
        moments = weft.function(products, collect="sum", team=team)
        error = weft.function(squared_error, collect="mean", whole=["solution"], team=team)
        predict = weft.function(np.matmul, split=[0], whole=[1], collect="gather", team=team)

        solution = np.linalg.solve(*moments(x, y, num_slices=8))
        mean = error(x, y, solution)
        some = generator.choice(ROWS, 1001, replace=False)  # each rank picks its own rows
        of_some = np.linalg.solve(*moments(x, y, batch=some))
        residuals = y - predict(x, solution)

    assert np.allclose(solution, truth, atol=0.01), solution
    assert np.allclose(solution, np.linalg.solve(*products(x, y)), rtol=1e-3, atol=1e-3)
    assert np.allclose(of_some, np.linalg.solve(*products(x[some], y[some])), rtol=1e-3, atol=1e-3)
    assert np.isclose(mean, squared_error(x, y, solution), rtol=1e-4)
    assert np.isclose(mean, np.mean(residuals.astype(float) ** 2), rtol=1e-4)
    print(f"{RANKS} ranks: {ROWS:,} rows in shared memory, as NumPy solves them; error {mean:.4f}")


if __name__ == "__main__":
    main()
