"""Memory that several processes see: made, named, counted and given back. In reading order:

segment.py      a segment (a memfd mapping), a block in it, and a handle for other processes
server.py       the blocks that this process made: allocation, reference counts, the serving thread
blocks.py       the blocks of other processes, and the interface of this package
arrays.py       NumPy arrays in blocks, and their pickles

Others call `blocks.allocate`, `blocks.export`, `blocks.attach`, and `arrays.copy_in`.
It imports `processes`.
"""
