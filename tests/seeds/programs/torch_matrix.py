"""Seed 001: MatrixTableHandler, all rows and some, in Python."""

import torch

from multiverso import torch_ext as multiverso

multiverso.init()
workers, worker = multiverso.num_workers(), multiverso.worker_id()

handler = multiverso.MatrixTableHandler(4, 3)
handler.add(torch.ones(4, 3))
handler.add([[0, 0, 1]] * 4)
multiverso.barrier()
found = handler.get()
assert isinstance(found, torch.Tensor)
assert torch.equal(found, workers * torch.tensor([[1.0, 1.0, 2.0]] * 4))
multiverso.barrier()

# only some rows: as many numbers as these have
handler.add(torch.tensor([[10.0, 20.0, 30.0], [0.0, 0.0, 5.0]]), [3, 1])
multiverso.barrier()
some = handler.get([3, 0, 1])
assert isinstance(some, torch.Tensor)
expected = workers * torch.tensor([[11.0, 21.0, 32.0], [1.0, 1.0, 2.0], [1.0, 1.0, 7.0]])
assert torch.equal(some, expected), some
assert torch.equal(handler.get(torch.tensor([3, 0, 1])), expected)

other = multiverso.MatrixTableHandler.new(2, 2)
other.add([1, 2, 3, 4])
other.add(torch.arange(2), row_ids=[1])
multiverso.barrier()
assert other.get().tolist() == [[workers, 2 * workers], [3 * workers, 5 * workers]]
multiverso.shutdown()
