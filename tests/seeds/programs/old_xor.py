"""What the Lua binding's tests and its demo did, in Python: tables of tensors, and a small network
whose workers add their gradients to one table."""

import torch

from multiverso import torch_ext as multiverso

multiverso.init()
workers, worker_id = multiverso.num_workers(), multiverso.worker_id()
is_master = worker_id == 0
assert multiverso.server_id() == worker_id

num_row, num_col, row_ids = 11, 10, [0, 1, 5, 10]
size = num_row * num_col
tbh = multiverso.MatrixTableHandler.new(num_row, num_col)
multiverso.barrier()
numbers = torch.arange(1.0, size + 1)
for i in range(1, 6):
    tbh.add(numbers)
    tbh.add(numbers.reshape(num_row, num_col)[row_ids].reshape(-1), row_ids)
    multiverso.barrier()
    data, some = tbh.get(), tbh.get(row_ids)
    multiverso.barrier()
    expected = numbers.reshape(num_row, num_col) * i * workers
    expected[row_ids] *= 2
    assert torch.equal(data, expected)
    assert torch.equal(some, expected[row_ids])

# the initial value is the master's, whatever the others pass
start = torch.arange(3.0) + worker_id
assert multiverso.ArrayTableHandler.New(3, start).get().tolist() == [0, 1, 2]
assert multiverso.MatrixTableHandler.New(1, 3, start).get().tolist() == [[0, 1, 2]]

torch.manual_seed(worker_id)
model = torch.nn.Sequential(torch.nn.Linear(2, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
inputs = torch.randn(128, 2)
labels = torch.where(inputs[:, :1] * inputs[:, 1:] > 0, -1.0, 1.0)
params = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
tbh = multiverso.ArrayTableHandler.new(params.numel())
if is_master:
    tbh.add(params)
    multiverso.barrier()
else:
    multiverso.barrier()
params.copy_(tbh.get())
for _ in range(200):
    torch.nn.utils.vector_to_parameters(params, model.parameters())
    model.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), labels).backward()
    gradients = torch.nn.utils.parameters_to_vector([one.grad for one in model.parameters()])
    tbh.add(-0.1 / workers * gradients)
    params.copy_(tbh.get())
    multiverso.barrier()
if is_master:
    torch.nn.utils.vector_to_parameters(tbh.get(), model.parameters())
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert (model(corners).reshape(-1).sign() == torch.tensor([-1.0, 1.0, 1.0, -1.0])).all()
multiverso.shutdown()
