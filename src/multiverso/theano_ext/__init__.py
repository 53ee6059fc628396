"""Models of Theano's family: PyTensor, which took Theano's place, Lasagne and Keras.

sharedvar.py       mv_shared, sync_all_mv_shared_vars
param_manager.py   MVModelParamManager: the parameters of any model
lasagne_ext/       a network of Lasagne's, or shared variables in a list or dict
keras_ext/         a model of Keras 3, on any backend, and a callback for `fit`
"""
