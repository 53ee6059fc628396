"""A lock between the ranks of a group, as tables have many."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import cloudpickle


def make_lock(group: Any) -> Any:
    """A lock. Every rank calls it."""
    from weft.engines.local.meeting import locks
    from weft.engines.local.meeting.meeting import TABLE, make_block

    meeting = group._meeting
    block = make_block(
        meeting,
        TABLE,
        leader=meeting.members[0],
        size=8 * locks.words_for(group.size),
        seconds=group.timeout,
        prepare=locks.Lock.format,
        point="table.made",
    )
    return locks.Lock(
        block,
        roster=meeting.roster,
        recorder=group._recorder,
        members=meeting.members,
        timeout=group.timeout,
    )


#: the same for programs that are given as text
MAKE_LOCK = "from typing import Any\n" + inspect.getsource(make_lock)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
