"""What Multiverso's own tests of tables did, and how the first of them imported it.

Every worker adds twice in each round; after a barrier everybody has all of it.
"""

import multiverso as mv
from multiverso import api
from multiverso.tables import ArrayTableHandler
from multiverso.utils import convert_data

api.init([])

for size in (1, 2000):  # one element was too few for the old servers
    tbh = ArrayTableHandler(size)
    mv.barrier()
    for i in range(10):
        tbh.add(range(1, size + 1))
        tbh.add(convert_data(range(1, size + 1)))
        mv.barrier()
        for j, actual in enumerate(tbh.get()):
            assert (j + 1) * (i + 1) * 2 * mv.workers_num() == actual
        mv.barrier()

num_row, num_col, row_ids = 11, 10, [0, 1, 5, 10]
size = num_row * num_col
tbh = mv.MatrixTableHandler(num_row, num_col)
mv.barrier()
for count in range(1, 21):
    tbh.add(range(size))
    tbh.add([range(rid * num_col, (1 + rid) * num_col) for rid in row_ids], row_ids)
    mv.barrier()
    data = tbh.get()
    mv.barrier()
    for i, row in enumerate(data):
        for j, actual in enumerate(row):
            times = 2 if i in row_ids else 1
            assert (i * num_col + j) * count * mv.workers_num() * times == actual
    data = tbh.get(row_ids)
    mv.barrier()
    for i, row in enumerate(data):
        for j, actual in enumerate(row):
            assert (row_ids[i] * num_col + j) * count * mv.workers_num() * 2 == actual

mv.shutdown()
