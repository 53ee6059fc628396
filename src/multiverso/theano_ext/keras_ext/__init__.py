"""Keras 3's models: `param_manager.KerasParamManager`, `callbacks.MVCallback`."""
