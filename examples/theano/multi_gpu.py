"""One GPU for each worker, which sees no other: join before PyTensor is imported, then train.

    weft run -n 2 examples/theano/multi_gpu.py
    python examples/theano/multi_gpu.py

Each worker says where it computes. Theano took its GPU from THEANO_FLAGS; PyTensor computes on GPUs
through JAX, and `weft run` lets each worker see one. Without GPUs, or with a JAX that
cannot use them, it says so and runs on the CPU. Either way the fit must be that of plain least
squares.
"""

import os

import multiverso as mv
import weft

mv.init(sync=True)  # workers in step: together they take the steps that one alone would
device = weft.device()  # "cuda:0" of those that this worker sees, or "cpu"
if device == "cpu":
    os.environ.setdefault("PYTENSOR_FLAGS", "linker=py,optimizer=fast_compile")
else:
    # workers that share a GPU must not each take all of its memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import pytensor
import pytensor.tensor as pt

from multiverso.theano_ext import sharedvar

mode, place = None, "the CPU: no GPU was found"
if device != "cpu":
    import jax

    mode = "JAX"
    jax.config.update("jax_enable_x64", True)
    found = jax.devices()[0]
    usable = found.platform != "cpu"
    place = f"{device}, {found.device_kind}" if usable else "the CPU: this JAX has no CUDA"
print(f"worker {mv.worker_id()} of {mv.workers_num()} computes on {place}", flush=True)

generator = np.random.default_rng(0)
inputs = generator.normal(size=(400, 5))
targets = inputs @ np.array([1.0, -2.0, 0.5, 3.0, 0.0]) + 0.1 * generator.normal(size=400)
mine = slice(mv.worker_id(), None, mv.workers_num())

w = sharedvar.mv_shared(np.zeros(5), name="w")
x, y = pt.matrix("x"), pt.vector("y")
cost = ((x @ w - y) ** 2).sum() / len(inputs)
step = pytensor.function([x, y], cost, updates=[(w, w - 0.1 * pt.grad(cost, w))], mode=mode)

for _ in range(200):
    step(inputs[mine], targets[mine])
    w.mv_sync()

best = np.linalg.lstsq(inputs, targets, rcond=None)[0]
assert np.allclose(w.get_value(), best, atol=1e-4), (w.get_value(), best)
if mv.is_master_worker():
    print(f"weights {np.round(w.get_value(), 2)}, as least squares has them")
mv.shutdown()
