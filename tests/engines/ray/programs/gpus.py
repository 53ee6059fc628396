"""Which workers get which GPUs of three hosts: host1 gives one, host2 two of its three, host3 none
of its own. Nobody computes on these: they are names."""

import os
import socket
import time
import warnings

import playdoh
import weft

warnings.simplefilter("error")
TWO, THREE = {"machines": ["host2"]}, {"machines": ["host2", "host3"]}
ON_GPUS = [("host1", True, "GPU-1a"), ("host2", True, "GPU-2a"), ("host2", True, "GPU-2b")]
ON_CORES = [("host1", False), ("host2", False)]


def where(_, use_gpu):
    time.sleep(0.02)
    return socket.gethostname(), use_gpu, os.environ.get("CUDA_VISIBLE_DEVICES")


def places(results):
    return sorted(set(results))


def cores(results):
    return sorted({one[:2] for one in results})


def policy(name, module=weft, **options):
    return module.distribute(where, gpu_policy=name, **options)(range(20))


# every machine has one: both policies use them, none without being asked
assert places(policy("require_all", **TWO)) == ON_GPUS
assert places(policy("prefer_gpu", playdoh, **TWO)) == ON_GPUS
assert places(playdoh.map(where, range(20), gpu_policy="require_all", **TWO)) == ON_GPUS
assert places(weft.map(where, range(20), gpus=9, **TWO)) == ON_GPUS
assert cores(policy("no_gpu", **TWO)) == ON_CORES
# what a machine does not give nobody sees there, also who uses none
assert ("host2", False, "GPU-2a,GPU-2b") in policy("no_gpu", **TWO)
# one worker for each GPU
each = weft.distribute(where, gpu_policy="prefer_gpu", **TWO)
assert sorted(each(None)) == ON_GPUS
# caps: of this machine, of all machines, and what this process may see
assert places(policy("prefer_gpu", playdoh, max_gpu=0, **TWO)) == ON_GPUS[1:]
assert places(weft.map(where, range(20), gpus=2, **TWO)) == ON_GPUS[:2]
assert cores(weft.map(where, range(20), gpus=0, **TWO)) == ON_CORES
os.environ["CUDA_VISIBLE_DEVICES"] = ""
assert places(policy("prefer_gpu", **TWO)) == ON_GPUS[1:]
assert ("host2", False, "GPU-2a,GPU-2b") in policy("no_gpu", **TWO)  # that of host2 is its own
os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-of-another-name"
try:
    policy("prefer_gpu", **TWO)
except weft.EngineUnavailable as error:
    assert "the GPUs of host1 were to be used; it has GPU-1a, of which this program" in str(error)
else:
    raise AssertionError("it has used a GPU that it may not see")
del os.environ["CUDA_VISIBLE_DEVICES"]

# one machine has none
assert places(policy("prefer_gpu", **THREE)) == ON_GPUS
for module, options, lacks in (
    (weft, THREE, "host3"),
    (playdoh, THREE, "host3"),
    (playdoh, {**TWO, "max_gpu": 0}, "host1"),
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = policy("require_all", module, **options)
    assert [use_gpu for _, use_gpu, _ in results] == [False] * 20
    (warning,) = caught
    assert f"gpu_policy='require_all': {lacks} has no GPU that may be used" in str(warning.message)
    assert warning.filename == __file__, warning.filename
print("done")
