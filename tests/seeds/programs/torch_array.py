"""Seed 001: init, barrier, shutdown, num_workers, worker_id and ArrayTableHandler, in Python."""

import torch

from multiverso import torch_ext as multiverso

multiverso.init()
workers, worker = multiverso.num_workers(), multiverso.worker_id()
assert worker in range(workers)

# syncing a model: its flattened parameters, for initialization and as the latest values
model = torch.nn.Linear(3, 2)
params = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
size = params.numel()

handler = multiverso.ArrayTableHandler(size)
assert torch.equal(handler.get(), torch.zeros(size))
multiverso.barrier()
handler.add(params if worker == 0 else torch.zeros(size))
multiverso.barrier()
params.copy_(handler.get())
torch.nn.utils.vector_to_parameters(params, model.parameters())

# during training the data are gradients, scaled: every worker ends with the sum of all steps
start = params.clone()
model(torch.ones(1, 3)).sum().backward()
gradient = torch.nn.utils.parameters_to_vector([one.grad for one in model.parameters()])
assert torch.equal(gradient, torch.ones(size))
multiverso.barrier()
handler.add(-0.5 * gradient)
multiverso.barrier()
found = handler.get()
assert isinstance(found, torch.Tensor)
assert found.dtype == torch.float32
assert found.shape == (size,)
assert torch.allclose(found, start - 0.5 * workers, atol=1e-5), (found, start)

# a Lua table is a list here, and `new` the constructor
other = multiverso.ArrayTableHandler.new(3)
other.add([1, 2, 3])
other.add(torch.arange(3, dtype=torch.float64))
multiverso.barrier()
assert other.get().tolist() == [workers, 3 * workers, 5 * workers]
multiverso.shutdown()
