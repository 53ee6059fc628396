"""Networks of Lasagne's kind: `param_manager.MVNetParamManager`."""
