"""What Multiverso's own tests of shared variables did: train, sync, and everybody has it all."""

import numpy as np
import pytensor as theano

import multiverso as mv
from multiverso.theano_ext import sharedvar

mv.init()

for row, col in ((1, 1), (20, 10)):
    W = sharedvar.mv_shared(
        value=np.zeros((row, col), dtype=theano.config.floatX), name="W", borrow=True
    )
    numbers = range(1, row * col + 1)
    delta = np.array(numbers, dtype=theano.config.floatX).reshape((row, col))
    train_model = theano.function([], updates=[(W, W + delta)])
    mv.barrier()
    for i in range(5):
        train_model()
        train_model()
        sharedvar.sync_all_mv_shared_vars()
        mv.barrier()
        # to get the newest value, we must sync again
        sharedvar.sync_all_mv_shared_vars()
        for j, actual in enumerate(W.get_value().reshape(-1)):
            assert (j + 1) * (i + 1) * 2 * mv.workers_num() == actual
        mv.barrier()

mv.shutdown()
