"""Seed 000, "About the master worker": only one process initializes the parameters."""

import numpy

import multiverso as mv

mv.init()

# create your table handler tbh and initial value params
tbh = mv.ArrayTableHandler(5)
params = numpy.arange(5) if mv.is_master_worker() else None

if mv.is_master_worker():
    # Only master worker will set the initial value.
    tbh.add(params)
    # Set a barrier for other workers to wait.
    mv.barrier()
else:
    # Wait the master worker to finish setting.
    mv.barrier()
    # Get the initial model from the server.
    params = tbh.get()

assert numpy.array_equal(params, [0, 1, 2, 3, 4]), params
mv.shutdown()
