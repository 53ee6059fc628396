"""Engines of two "hosts" that share no memory, for what one host cannot show.

Their processes are the local engine's, and meet as these do; what they send is pickled, and nobody
uses another's memory. Ranks 0, 2, 4 ... are on host "a", the others on "b".
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

import weft
from tests.contracts.two_stores import Tables
from weft._core import failures
from weft._core.arithmetic import Array, accumulate, finish, wide_type
from weft._core.calls import Call, Combination, UnlikeArrays
from weft._core.tables import TableSpec
from weft.adapters import models
from weft.engines import base
from weft.engines.local import group as local_group
from weft.engines.local.group import LocalGroup
from weft.engines.local.memory.arrays import SharedArray
from weft.engines.local.pool.payload import Payload, unpicklable_error
from weft.engines.local.pool.payload_arrays import PlacedArray
from weft.engines.local.team import team as local_team
from weft.engines.local.team.team import LocalTeam


def hosts_of(ranks: Sequence[int]) -> tuple[str, ...]:
    """The hosts of some ranks of the world."""
    return tuple("ab"[rank % 2] for rank in ranks)


# a group


def on_two_hosts(group: LocalGroup, function: Callable[..., Any], *arguments: Any) -> Any:
    """In a rank: call a function with the group of `weft.init`, on two hosts from now on."""
    weft.shutdown()
    failures.OUTSIDE[on_two_hosts.__code__.co_filename] = False  # as a part of weft
    join = local_group.join
    local_group.join = lambda *place, **options: as_two_hosts(join(*place, **options))
    return function(weft.init(timeout=group.timeout), *arguments)


def as_two_hosts(group: Any) -> Any:
    if group is not None:
        group.__class__ = GroupOfTwoHosts
    return group


class GroupOfTwoHosts(LocalGroup):
    """Every array crosses as bytes, and every table is two stores."""

    allocate = base.Group.allocate
    all_reduce = base.Group.all_reduce
    #: made with the first table
    _tables: Tables | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        return hosts_of(self._meeting.members)

    def split(self, color: int | None, *, key: int = 0, timeout: float | None = None) -> Any:
        return as_two_hosts(super().split(color, key=key, timeout=timeout))

    def survivors(self, *, timeout: float | None = None) -> Any:
        return as_two_hosts(super().survivors(timeout=timeout))

    def make_store(self, spec: TableSpec, values: Array | None) -> Any:
        super().make_store(spec, None)  # all ask for the same; its memory is not used
        self._tables = self._tables or Tables(self)
        return self._tables.make(spec, values)

    def leave(self) -> None:
        super().leave()
        if self._tables is not None:
            self._tables.close()

    def _exchange(self, call: Call, seconds: float) -> None:
        message = pickle.dumps((call.common, call.own, list(call.source)))
        gather = base.make_call(self, "all_gather", message, {"out": None})
        super()._exchange(gather, seconds)
        commons, owns, sources = zip(*map(pickle.loads, gather.result()), strict=True)
        if len(set(commons)) > 1:
            raise self._meeting.disagreement_error(
                {r: one.decode() for r, one in enumerate(commons)}
            )
        try:
            plan = call.settle(owns)
        except UnlikeArrays as unlike:
            words = {rank: f"{call.name}({given})" for rank, given in unlike.ranks.items()}
            raise self._meeting.disagreement_error(words) from None
        if isinstance(plan, Combination):
            for at, target in enumerate(plan.target):
                parts = [arrays[at] for arrays in sources]
                combine(self.hosts, parts, target, plan.elements[at], plan)
        else:
            for copy in plan.incoming:
                part = sources[copy.from_rank][copy.from_array].view(np.uint8)[copy.from_byte :]
                target = plan.target[copy.to_array].view(np.uint8)[copy.to_byte :]
                target[: copy.length] = part[: copy.length]
        call.finish()


def combine(
    hosts: Sequence[str], parts: Sequence[Array], target: Array, element: str, plan: Combination
) -> None:
    """Each host has the total of its ranks; these totals come to the result."""
    op, weights = plan.op, plan.weights
    wide = wide_type(target.dtype, op, element, weighted=weights is not None)
    totals: list[tuple[Array, float]] = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, at in enumerate(hosts) if at == host]
        total = np.empty(target.shape, wide)
        own = None if weights is None else [weights[rank] for rank in ranks]
        weight = accumulate([parts[rank] for rank in ranks], total, op, element, own)
        totals += [(total, weight)] if weight else []
    total = np.empty(target.shape, wide)
    accumulate([total for total, _ in totals], total, op, wide.name)
    finish(total, target, op, element, sum(weight for _, weight in totals))


# a team


class TeamOfTwoHosts(LocalTeam):
    """What workers get is pickled for each of them; they share nothing with the driver."""

    def _shares(self, value: Any) -> bool:
        return False

    @property
    def hosts(self) -> tuple[str, ...]:
        return hosts_of(range(self.size))

    def _call(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        common: Mapping[str, Any] = base.NO_COMMON,
    ) -> list[Any]:
        sent = [one if one is None else (apart((function, one, dict(common))),) for one in own[1:]]
        mine = None if own[0] is None else ((function, own[0], common),)
        if function is local_team.renew:
            return super()._call(function, own)
        return super()._call(run_apart, [mine, *sent])


def run_apart(member: base.Member, work: Any) -> Any:
    """Remote function: what was sent, as a copy; in the driver what there is."""
    function, own, common = pickle.loads(work) if isinstance(work, bytes) else work
    return function(member, *own, **common)


def apart(
    value: Any, persistent_id_of: Callable[[int], Any] = lambda _: None, name: str = "arguments"
) -> bytes:
    """A value as bytes that refer to nobody's memory."""

    ordered: set[Any] = set()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def persistent_id(self, mentioned: Any) -> Any:
            return persistent_id_of(id(mentioned))

        def reducer_override(self, mentioned: Any) -> Any:
            if type(mentioned) in (SharedArray, PlacedArray):
                return np.array, (np.array(mentioned, subok=False),)
            reduced = models.reduce(mentioned, ordered)
            return super().reducer_override(mentioned) if reduced is None else reduced

    file = io.BytesIO()
    try:
        Pickler(file, 5).dump(value)
    except Exception as error:
        raise unpicklable_error(value, name, error) from error
    return file.getvalue()


def pack_apart(value: Any, persistent_id_of: Callable[[int], Any], name: str) -> Payload:
    """In the place of `team.pack_for_registration`."""
    payload = Payload()
    payload.data = apart(value, persistent_id_of, name)
    return payload
