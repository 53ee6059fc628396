"""How long `distribute()` takes beside building the functions: five of a PyTensor network.

    python benchmarks/sending.py            with what PyTensor's compiler keeps on disk
    python benchmarks/sending.py --cold     with nothing there: takes a minute or two

Building rewrites the graph and links it; the compiler itself works at the first call. Sending a
function is packing the rewritten graph here and linking it in every worker. The worker's import of
PyTensor, which comes with the first function, is shown by itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if "--cold" in sys.argv:
            os.environ["PYTENSOR_FLAGS"] = f"base_compiledir={folder}"
            os.environ["NUMBA_CACHE_DIR"] = folder
        measure()


def measure() -> None:
    import numpy as np
    import pytensor

    import synkhronos as synk

    synk.fork(2)
    first = synk.function([], pytensor.shared(np.ones(2)).sum())
    loaded = seconds(first.send)
    functions: list[tuple[Any, tuple[Any, ...]]] = []
    built = seconds(lambda: functions.extend(build()))
    called = seconds(lambda: [one.as_theano(*inputs) for one, inputs in functions])
    sent = seconds(synk.distribute)
    both = seconds(lambda: [one(*inputs) for one, inputs in functions])
    synk.close()
    rows = {
        "built in the driver": built,
        "first calls in the driver": called,
        "PyTensor loaded in the worker": loaded,
        "distribute()": sent,
        "first calls in both": both,
    }
    for name, value in rows.items():
        print(f"{name:<32}{value:8.2f} s")
    print(f"distribute() / built            {sent / built:8.2f} (at most 1.5)")


def build() -> list[tuple[Any, tuple[Any, ...]]]:
    """Functions of a network of 784-800-800-10, and inputs for each."""
    import numpy as np
    import pytensor
    import pytensor.tensor as pt

    import synkhronos as synk
    from synkhronos.extensions import updates

    rng = np.random.default_rng(0)
    x, y = pt.matrix("x", dtype="float32"), pt.vector("y", dtype="int32")
    parameters, layer = [], x
    for before, after in ((784, 800), (800, 800), (800, 10)):
        weights = rng.normal(size=(before, after)).astype("float32") / np.float32(before**0.5)
        parameters += [pytensor.shared(weights), pytensor.shared(np.zeros(after, "float32"))]
        layer = layer.dot(parameters[-2]) + parameters[-1]
        layer = pt.maximum(layer, 0) if after == 800 else pt.special.log_softmax(layer, axis=1)
    loss = -layer[pt.arange(y.shape[0]), y].mean()
    right = pt.eq(layer.argmax(axis=1), y).sum()
    gradients, step, _ = updates.adam(loss, parameters)
    rows = rng.normal(size=(64, 784)).astype("float32")
    both = (rows, rng.integers(0, 10, 64).astype("int32"))
    return [
        (synk.function([x, y], loss, updates=gradients), both),
        (synk.function([], updates=step), ()),
        (synk.function([x, y], loss), both),
        (synk.function([x, y], (right, "sum")), both),
        (synk.function([x], (layer, "gather")), (rows,)),
    ]


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
