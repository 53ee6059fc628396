"""Seed 000, "How to use multi-GPU in theano with multiverso": the flags of each worker."""

import os
import sys

frameworks = {"pytensor", "torch", "jax", "keras"} & set(sys.modules)

import multiverso as mv

mv.init()
worker_id = mv.worker_id()
assert {"pytensor", "torch", "jax", "keras"} & set(sys.modules) == frameworks, "none by multiverso"
# NOTICE: To use multiple gpus, we need to set the environment before import theano.
if "THEANO_FLAGS" not in os.environ:
    flags = "floatX=float32,device=gpu%d,lib.cnmem=1" % worker_id  # noqa: UP031  as the seed has it
    os.environ["THEANO_FLAGS"] = flags

# import theano after this
import pytensor as theano

assert os.environ["THEANO_FLAGS"] == f"floatX=float32,device=gpu{mv.worker_id()},lib.cnmem=1"
assert theano.shared(1.5).get_value() == 1.5
mv.shutdown()
