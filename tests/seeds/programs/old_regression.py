"""What Multiverso's first example of Theano did: weights in two tables, gradients added to them.

Each worker takes its own minibatches; only the master validates. T.nnet.softmax is PyTensor's
`pytensor.tensor.special.softmax`; the data are drawn here.
"""

import numpy
import pytensor as theano
import pytensor.tensor as T  # noqa: N812  its usual name
from pytensor.tensor.special import softmax

import multiverso as mv

generator = numpy.random.default_rng(0)
n_in, n_out, batch_size, learning_rate = 6, 3, 20, 0.5
data_x = generator.normal(size=(240, n_in))
data_y = (data_x @ generator.normal(size=(n_in, n_out))).argmax(axis=1).astype("int32")
shared_x, shared_y = theano.shared(data_x, borrow=True), theano.shared(data_y, borrow=True)

index, x, y = T.lscalar(), T.dmatrix("x"), T.ivector("y")
W, b = T.dmatrix("W"), T.drow("b")
probability = softmax(T.dot(x, W) + b, axis=1)
cost = -T.mean(T.log(probability)[T.arange(y.shape[0]), y])
errors = T.mean(T.neq(T.argmax(probability, axis=1), y))
batch = slice(index * batch_size, (index + 1) * batch_size)
train_model = theano.function(
    inputs=[index, W, b],
    outputs=[cost, T.grad(cost, W), T.grad(cost, b)],
    givens={x: shared_x[batch], y: shared_y[batch]},
)
validate_model = theano.function([W, b], errors, givens={x: shared_x, y: shared_y})

mv.init()
total_worker, is_master_worker = mv.workers_num(), mv.worker_id() == 0
W_tbh, b_tbh = mv.MatrixTableHandler(n_in, n_out), mv.ArrayTableHandler(n_out)
n_batches = len(data_x) // batch_size
for _ in range(20):
    for minibatch_index in range(n_batches):
        if minibatch_index % total_worker == mv.worker_id():
            now = W_tbh.get(), b_tbh.get().reshape((1, b_tbh._size))
            _, *changes = train_model(minibatch_index, *now)
            W_tbh.add(-learning_rate * changes[0])
            b_tbh.add(-learning_rate * changes[1])
    mv.barrier()
if is_master_worker:
    wrong = validate_model(W_tbh.get(), b_tbh.get().reshape((1, b_tbh._size)))
    assert wrong < 0.1, wrong
mv.shutdown()
