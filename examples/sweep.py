"""A sweep over two parameters: how many people an epidemic reaches, with a bar and a plot.

    python examples/sweep.py [plot.png]

Each item is one epidemic, followed to its end: short where the disease spreads fast, long where
it hardly does, so that an even split would leave workers idle. What share z of the people it
reaches is known: z = 1 - exp(-R z), where R is how many people each sick one makes sick.
"""

import math
import sys

import weft


def reached(parameters: tuple[float, float]) -> float:
    """The share of people who have been sick when it is over: days go by in small steps."""
    contagion, recovery = parameters
    healthy, sick, step = 1 - 1e-6, 1e-6, 0.05 / (contagion + recovery)
    while sick > 1e-9:
        # the rates half a step later, which makes the error a hundred times smaller
        new, well = contagion * healthy * sick, recovery * sick
        half_healthy = healthy - new * step / 2
        half_sick = sick + (new - well) * step / 2
        healthy -= contagion * half_healthy * half_sick * step
        sick += (contagion * half_healthy - recovery) * half_sick * step
    return 1 - healthy


def plot(contagions: list[float], recoveries: list[float], shares: list[float], path: str) -> str:
    """Draw the shares as a map; what has become of it, in words."""
    try:
        import matplotlib
    except ImportError:
        return "no plot without matplotlib: pip install matplotlib"
    matplotlib.use("Agg")  # a file needs no window
    from matplotlib import pyplot

    rows = [shares[i : i + len(recoveries)] for i in range(0, len(shares), len(recoveries))]
    _, axes = pyplot.subplots()
    colours = axes.pcolormesh(recoveries, contagions, rows, shading="nearest")
    pyplot.colorbar(colours, label="share of people reached")
    axes.set(xlabel="recovery per day", ylabel="contagion per day", title="Epidemics")
    pyplot.savefig(path)
    return f"plot in {path}"


def main() -> None:
    contagions = [0.05 * n for n in range(4, 24)]
    recoveries = [0.025 * n for n in range(4, 24)]
    pairs = [(contagion, recovery) for contagion in contagions for recovery in recoveries]
    shares = weft.map(reached, pairs, progress="epidemics")

    wrong = 0.0
    for (contagion, recovery), z in zip(pairs, shares, strict=True):
        if contagion / recovery > 1.2:  # else it hardly begins, and the first sick count
            wrong = max(wrong, abs(z - 1 + math.exp(-contagion / recovery * z)))
    assert wrong < 1e-4, wrong
    assert all(0 < z < 1 for z in shares)
    print(f"{len(pairs)} epidemics; none is further than {wrong:.1e} from the known share")
    if len(sys.argv) > 1:
        print(plot(contagions, recoveries, shares, sys.argv[1]))


if __name__ == "__main__":
    main()
