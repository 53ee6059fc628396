"""Maps one after the other, in which somebody else kills: says when each is under way, and how it
ended."""

import contextlib
import json
import os
import socket
import sys
import time

import weft


def slow(x):
    for _ in range(30):
        time.sleep(0.01)
    return socket.gethostname()


def until_seen(host, seen):
    """Items until one was run on this host."""
    end = time.monotonic() + 100
    while host not in seen and time.monotonic() < end:
        yield 0


def say(*words):
    print(*words, flush=True)


def outcome(handle):
    try:
        results = handle.wait()
    except weft.WeftError as error:
        return type(error).__name__, str(error)
    lost = [str(one) for one in results if isinstance(one, Exception)]
    hosts = sorted({one for one in results if isinstance(one, str)})
    return len(results) - len(lost), lost, hosts


for name, options in json.loads(sys.argv[1]):
    awaited, seen = options.pop("until", None), set()
    items = range(24) if awaited is None else until_seen(awaited, seen)
    try:
        handle = weft.map_async(slow, items, **{"engine": "ray", **options})
    except weft.WeftError as error:
        say("END", json.dumps([name, (type(error).__name__, str(error))]))
        continue
    with contextlib.suppress(weft.WeftError):
        for _, host in handle.results():
            seen.add(host)
            if len(seen) > 1 and awaited is None:  # both hosts have begun
                break
            if len(seen) > 1:
                say("BEGIN", name)
    if awaited is None:
        say("BEGIN", name)
    say("END", json.dumps([name, outcome(handle)]))
say("pid", os.getpid(), "lives")
