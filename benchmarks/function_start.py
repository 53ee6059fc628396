"""Five functions of a network, compiled by PyTensor and sent to the other rank by synkhronos.

    python benchmarks/function_start.py

Prints as one line of JSON the seconds that compiling them took, that `distribute()` took, and that
the first call of one of them took. PyTensor compiles to machine code when a function is first
called, in each process, and keeps that in its cache.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import synkhronos as synk

RANKS, LAYERS, ROWS = 2, (784, 800, 800, 10), 64


def main() -> None:
    pytensor.config.floatX = "float32"
    synk.fork(RANKS, use_gpu=False)
    began = time.perf_counter()
    functions = network()
    compiled = time.perf_counter()
    synk.distribute()
    sent = time.perf_counter()
    generator = np.random.default_rng(1)
    x = generator.random((ROWS, LAYERS[0]), dtype=np.float32)
    y = generator.integers(LAYERS[-1], size=ROWS)
    loss = float(functions["train"](x, y))
    called = time.perf_counter()
    synk.close()
    if not np.isfinite(loss):
        raise SystemExit(f"the loss is {loss}")
    print(json.dumps({"weft": sent - compiled, "compile": compiled - began, "call": called - sent}))


def network() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    x, y = pt.fmatrix("x"), pt.lvector("y")
    parameters, layer = [], x
    for before, after in itertools.pairwise(LAYERS):
        weights = generator.normal(0, 0.05, (before, after)).astype(np.float32)
        parameters += [pytensor.shared(weights), pytensor.shared(np.zeros(after, np.float32))]
        layer = (pt.tanh(layer) if parameters[2:] else layer) @ parameters[-2] + parameters[-1]
    chances = pt.special.softmax(layer, axis=1)
    loss = -pt.log(chances[pt.arange(y.shape[0]), y]).mean()
    wrong = pt.neq(chances.argmax(axis=1), y).mean()
    gradients = pytensor.grad(loss, parameters)
    updates = [(one, one - 0.1 * step) for one, step in zip(parameters, gradients, strict=True)]
    return {
        "predict": synk.function([x], (chances, "gather")),
        "loss": synk.function([x, y], loss),
        "test": synk.function([x, y], [loss, wrong]),
        "gradients": synk.function([x, y], gradients),
        "train": synk.function([x, y], loss, updates=updates),
    }


if __name__ == "__main__":
    main()
