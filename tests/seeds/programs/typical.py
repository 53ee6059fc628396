"""Seed 000, "How to write python code with multiverso": the typical example."""

# import multiverso.
import multiverso as mv

# Init multiverso.
mv.init()
# Get total number of workers.
print(mv.workers_num())
# Get the id for current worker.
print(mv.worker_id())
# if the worker is master worker.
print(mv.is_master_worker())

# Here is your code to create tables, train models and sync values.
table = mv.ArrayTableHandler(3)
table.add([1, 2, 3])
mv.barrier()
assert table.get().tolist() == [mv.workers_num() * number for number in (1, 2, 3)]
assert mv.worker_id() in range(mv.workers_num())
assert mv.is_master_worker() == (mv.worker_id() == 0)
mv.barrier()

# Shutdown multiverso
mv.shutdown()
