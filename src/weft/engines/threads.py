"""Threads that start whole or not at all, wherever a signal handler raises."""

from __future__ import annotations

import _thread
import threading


def start(thread: threading.Thread) -> None:
    """Start a thread. Whoever is interrupted in here does not know whether it runs.

    `Thread.start` takes several steps, and a signal handler that raises between two of them leaves
    a thread that dies as it begins. Handlers run in the main thread only, so the steps are taken in
    another one, which begins in a single step. Raises RuntimeError if there can be no more threads.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    started = threading.Lock()
    started.acquire()
    errors: list[RuntimeError] = []
    _thread.start_new_thread(_start, (thread, started, errors))
    started.acquire()
    for error in errors:
        raise error


def _start(thread: threading.Thread, started: threading.Lock, errors: list[RuntimeError]) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        errors.append(error)
    finally:
        started.release()
