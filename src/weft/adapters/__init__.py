"""Whose arrays and models: each adapter is a module that knows those of one library.

lookup.py       the adapter of a value, loaded at the first sight of its type; what an adapter has

The adapters, each named as its library is imported:

numpy.py        arrays; an array as a model
torch.py        tensors and modules
jax.py          arrays, and pytrees in a Holder
keras.py        models and layers, on any backend
pytensor.py     shared variables, functions, and layers of Lasagne
numbers.py      Python's own numbers, as arrays
scalars.py      NumPy's single numbers, as arrays

What several of them use:

contents.py     what is compared to tell whether a value has changed
holder.py       `weft.Holder`: a place for a value that cannot be changed itself
containers.py   lists, tuples and dicts of arrays or models, taken apart and put together
torch_arrays.py tensors on a device, as the arrays of a collective
torch_rows.py   some rows of a tensor, for tables on a device
torch_row_ids.py row ids on a device, validated there
torch_values.py  a model's values as tensors on a device
models.py       an object's values, whichever library it is from

Training with one library:

torch_training.py  a training step of a torch module
torch_batchnorm.py its batch normalisation over the rows of all ranks
jax_training.py    a training step of JAX arrays
"""
