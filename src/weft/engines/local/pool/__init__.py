"""A driver and workers for independent calls. In reading order:

pool.py         LocalPool: a job, from its first chunk to its last
workers.py      the workers of this process: start them, lend them to calls
remote_worker.py   one worker as its driver sees it; waiting for several; how one was lost
worker.py       the worker's side: receive, run, reply
rescue.py       what is finished at a deadline, where the function does not end
driver_state.py    what the driver has set for itself: environment, settings of libraries
forwarded_warnings.py  its rules for warnings; a worker's warnings, issued in the driver
modules.py      the user's modules in workers, brought up to date
by_value.py     their functions, classes and instances, sent by value
messages.py     what the two send to each other
payload.py      functions, items and results as bytes; loads no NumPy
payload_arrays.py  their large arrays, which go through shared memory
fork_server.py  the process that forks workers
interpreter.py  starts that process while the rest is loaded
nesting.py      workers that start workers of their own: how deep they may
named_pipe.py   a fork server that every script of the user can reach

It imports `processes` and `memory`; it knows neither ranks nor groups.
"""
