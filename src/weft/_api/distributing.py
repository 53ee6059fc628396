"""`distribute`: a function over lists and matrices, as if it ran here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from weft._api.mapping import (
    ALL_CORES,
    Bar,
    Exceptions,
    Options,
    make_pool,
    put_all,
)
from weft._core.arguments import validate_count
from weft._core.items import (
    NOTHING,
    Collected,
    Finished,
    Job,
    Unwrapping,
    bind,
    takes_an_item,
    validate_callable,
)
from weft._core.partition import part_of
from weft.errors import AlreadyFinished, InvalidType, InvalidValue, format_bytes

if TYPE_CHECKING:
    from weft._core.arithmetic import Array

POLICIES = ("no_gpu", "prefer_gpu", "require_all")


def distribute(
    fun: Callable[..., Any],
    *,
    shared_data: Mapping[str, Any] | None = None,
    max_cpu: int | None = None,
    max_gpu: int | None = None,
    gpu_policy: str = "no_gpu",
    machines: Sequence[str] = (),
    named_pipe: bool | str | None = None,
    port: int | None = None,
    accept_lists: bool = False,
    endaftercall: bool = False,
    verbose: bool = False,
    seed: int | None = None,
    retries: int = 0,
    retry_on: Exceptions = (),
    progress: bool | str = False,
    timeout_each: float | None = None,
) -> DistributedFunction:
    """Return `fun` as a function that uses all cores of this machine, and of others.

    Call the result with a list to get the list of results, with an array to split it along its last
    axis and join what comes back, or with None to call `fun` once in every worker.

    >>> import numpy, weft
    >>> weft.distribute(lambda x: x * x)([1, 2, 3])
    [1, 4, 9]
    >>> weft.distribute(lambda x: x.sum(axis=0))(numpy.ones((5, 4)))
    array([5., 5., 5., 5.])

    The function is sent as it is now: later changes of its globals have no effect.

    shared_data   a dict that every call gets: `fun(x, shared_data)`. Its arrays lie in read-only
                  shared memory, once for all workers.
    max_cpu       the most workers of this machine; there are no more than cores. -1: one for each.
    max_gpu       the most GPUs of this machine, if any are used.
    gpu_policy    "no_gpu"; "prefer_gpu": only GPUs, as soon as any machine has one; "require_all":
                  GPUs if every machine has one, else CPUs, with a warning. There is one worker for
                  each GPU, which sees only this one. A parameter `use_gpu` of `fun` says which it
                  is.
    machines      names of other machines that take part, after `weft open` there and here.
    port          the port of their cluster, 2718 by default.
    named_pipe    True or a name: the workers come from `weft open --pipe NAME`.
    accept_lists  `fun` takes a list and returns one: each worker gets its items in one call.
    endaftercall  whether the result can be called only once.
    verbose       print which worker ran what, for how long, and how many bytes moved; show a bar.
    seed, retries, retry_on, progress, timeout_each  as in `weft.map`.

    Raises InvalidType, InvalidValue; MachineUnavailable, which lists what is wrong with machines.
    """
    return DistributedFunction(
        fun,
        shared_data=shared_data,
        max_cpu=max_cpu,
        max_gpu=max_gpu,
        gpu_policy=gpu_policy,
        machines=machines,
        named_pipe=named_pipe,
        port=port,
        accept_lists=accept_lists,
        endaftercall=endaftercall,
        verbose=verbose,
        seed=seed,
        retries=retries,
        retry_on=retry_on,
        progress=progress,
        timeout_each=timeout_each,
    )


def _validate_cap(max_cpu: int | None) -> int | None:
    if max_cpu is None or max_cpu == ALL_CORES:
        return None
    return validate_count(max_cpu, "distribute", "max_cpu", least=1)


def _validate_policy(policy: str) -> str:
    if policy not in POLICIES:
        known = ", ".join(map(repr, POLICIES))
        raise InvalidValue(f"distribute(gpu_policy={policy!r}): expected one of {known}")
    return policy


class DistributedFunction:
    """A function over many items: what `distribute` returns, whose arguments it takes."""

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        shared_data: Mapping[str, Any] | None = None,
        max_cpu: int | None = None,
        max_gpu: int | None = None,
        gpu_policy: str = "no_gpu",
        machines: Sequence[str] = (),
        named_pipe: bool | str | None = None,
        port: int | None = None,
        accept_lists: bool = False,
        endaftercall: bool = False,
        verbose: bool = False,
        seed: int | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        progress: bool | str = False,
        timeout_each: float | None = None,
    ) -> None:
        self._options = Options(
            shared_data=shared_data,
            seed=seed,
            retries=retries,
            retry_on=retry_on,
            progress=progress or verbose,
            timeout_each=timeout_each,
        ).validate("distribute")
        validate_callable(fun, "distribute(fun)")
        self._pool = make_pool(
            None,
            None,
            machines=machines,
            port=port,
            gpu_policy=_validate_policy(gpu_policy),
            max_cpu=_validate_cap(max_cpu),
            max_gpu=None
            if max_gpu is None
            else validate_count(max_gpu, "distribute", "max_gpu", least=0),
            named_pipe=named_pipe,
        )
        self._fun = fun
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._accept_lists, self._endaftercall = accept_lists, endaftercall
        self._verbose = verbose
        data = put_all(self._pool, self._options.shared_data)
        self._takes_an_item = takes_an_item(fun, besides=0 if data is None else 1)
        bound = bind(fun, shared_data=data, use_gpu=self._pool.uses_gpus)
        self._on_items = self._pool.prepare(bound)
        self._on_others = self._pool.prepare(Unwrapping(bound))
        self._over = ""

    def __call__(self, x: Any) -> Any:
        """Call the function on every item of a list, on an array, or with None once per worker.

        Raises AlreadyFinished, InvalidType, InvalidValue, and what `weft.map` raises.
        """
        if self._over:
            raise AlreadyFinished(self._over)
        call = self._call_for(x)
        try:
            return call(x)
        finally:
            if self._endaftercall:
                self.finished()
                self._over = (
                    f"the distributed function {self._name!r} has been called, and was made to "
                    "end after its first call; to call it several times:\n"
                    "    dfun = distribute(fun, endaftercall=False)"
                )

    def finished(self) -> None:
        """Drop the function and its shared data. Workers behind a named pipe stay."""
        if not self._over:
            self._pool.forget(self._on_items)
            self._pool.forget(self._on_others)
            self._over = (
                f"the distributed function {self._name!r} has been finished; make a new one:\n"
                "    dfun = distribute(fun)"
            )

    def shutdown(self) -> None:
        """Do what `finished` does, and end the workers: those behind a named pipe, and the nodes of
        a cluster, for everybody."""
        self.finished()
        self._pool.shut_down()

    def __enter__(self) -> DistributedFunction:
        return self

    def __exit__(self, *_: object) -> None:
        self.finished()

    def __repr__(self) -> str:
        return f"<DistributedFunction {self._name!r} on {self._pool.size} workers>"

    # one method for each kind of argument

    def _call_for(self, x: Any) -> Callable[[Any], Any]:
        if x is None:
            return self._once_each
        if isinstance(x, (list, tuple, range)):
            return self._on_sublists if self._accept_lists else self._on_list
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(x, numpy.ndarray):
            from weft._core.partition import validate_columns

            validate_columns(x)
            return self._on_array
        raise InvalidType(
            f"{self._name!r}, distributed, got a {type(x).__name__}; expected a list (one call "
            "for each element), an array (split along its last axis), or None (one call in each "
            "worker)"
        )

    def _once_each(self, _: None) -> list[Any]:
        item = None if self._takes_an_item else NOTHING
        return self._run(self._on_others, [item] * self._pool.size, one_each=True)

    def _on_list(self, items: Sequence[Any]) -> list[Any]:
        return self._run(self._on_items, items)

    def _on_sublists(self, items: Sequence[Any]) -> list[Any]:
        count = min(len(items), self._pool.size)
        bounds = [part_of(len(items), count, part) for part in range(count)]
        parts = self._run(self._on_items, [list(items[start:stop]) for start, stop in bounds])
        for (start, stop), part in zip(bounds, parts, strict=True):
            if not isinstance(part, (list, tuple)) or len(part) != stop - start:
                got = f"{len(part)}" if isinstance(part, (list, tuple)) else type(part).__name__
                raise InvalidValue(
                    f"{self._name!r} got the list of items {start} to {stop - 1} and returned "
                    f"{got}; with accept_lists expected a list of {stop - start} results"
                )
        return [result for part in parts for result in part]

    def _on_array(self, array: Array) -> Array:
        from weft._core.partition import FIXED, cut, paste

        # with a seed the parts are the same for any number of workers, so the numbers are too
        count = self._pool.size if self._options.seed is None else FIXED
        parts = cut(array, count, self._pool.put(array))
        return paste(array, parts, self._run(self._on_others, parts))

    def _run(self, prepared: Any, items: Sequence[Any], *, one_each: bool = False) -> list[Any]:
        options = self._options
        job = Job(
            prepared,
            items,
            seed=options.seed,
            retries=options.retries,
            retry_on=options.retry_on,  # type: ignore[arg-type]  # a tuple, once validated
            one_each=one_each,
            timeout_each=options.timeout_each,
        )
        collected = Collected(len(items), keep_failures=False)
        with (
            Bar(options.progress, len(items), self._name) as bar,
            closing(self._pool.run(job)) as finished,
        ):
            for part in finished:
                if self._verbose:
                    bar.say(self._report(part))
                collected.add(part)
                bar.show(collected.finished, collected.failed)
        return collected.results

    def _report(self, part: Finished) -> str:
        last = part.first + len(part.values) - 1
        which = f"item {last}" if last == part.first else f"items {part.first} to {last}"
        return (
            f"weft: worker {part.worker} (pid {part.pid}) ran {which} of {self._name!r} "
            f"in {part.seconds * 1000:.3g} ms; {format_bytes(part.sent)} there, "
            f"{format_bytes(part.received)} back"
        )
