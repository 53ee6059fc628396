"""Seed 000, "How to use multiverso in lasagne". Its network is a list of shared variables here."""

import numpy
import pytensor as theano

import multiverso as mv
from multiverso.theano_ext.lasagne_ext import param_manager

mv.init()


def build_model():
    generator = numpy.random.default_rng(mv.worker_id())
    return [
        theano.shared(generator.normal(size=(4, 3)).astype("float32"), name="W"),
        theano.shared(generator.normal(size=3), name="b"),
    ]


network = build_model()  # build_model is a function you implement to build model

# The MVNetParamManager will initialize the parameters and sync them with
# parameter server
mvnpm = param_manager.MVNetParamManager(network)
masters = numpy.random.default_rng(0)
start = [masters.normal(size=(4, 3)).astype("float32"), masters.normal(size=3)]
for variable, value in zip(network, start, strict=True):
    assert variable.dtype == value.dtype
    assert numpy.array_equal(variable.get_value(), value), "everybody starts as the master does"

# training the model
for variable in network:
    variable.set_value(variable.get_value() + mv.worker_id() + 1)

# When you are ready to add the delta of the variable in this model to the parameter server and get
# the latest value, you can run this function
mvnpm.sync_all_param()
mv.barrier()
mvnpm.sync_all_param()
total = sum(range(1, mv.workers_num() + 1))
for variable, value in zip(network, start, strict=True):
    assert variable.dtype == value.dtype
    assert numpy.allclose(variable.get_value(), value + total, rtol=1e-6), variable

mv.shutdown()
