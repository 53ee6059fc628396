"""Memory that several processes map: allocated, exported, counted and freed. In reading order:

segment.py      a segment (a memfd mapping), a block in it, its handle, and the blocks mapped here
server.py       the blocks that this process made: allocation, reference counts, the serving thread
blocks.py       the blocks of other processes, and the interface of this package
cuda.py         memory of a GPU, by descriptors, and memory of the host that a GPU reaches
arrays.py       NumPy arrays in blocks, and their pickles

Others call `blocks.allocate`, `blocks.export`, `blocks.attach`, and `arrays.copy_in`.
It imports `processes`.
"""
