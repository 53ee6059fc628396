"""Tests of frameworks that need a process of their own; `test_apart.py` runs each file in one.

JAX warns at every later fork of the process; Keras has one backend for the life of a process;
PyTensor leaves temporary files whenever it compiles.
"""
