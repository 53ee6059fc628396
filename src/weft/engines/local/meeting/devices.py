"""Memory of devices that all ranks of a meeting map: a segment of each rank, on its own device.

    every rank   makes its segment, and listens
                 --- names of the listeners ---
                 connects to every other rank, and sends it the segment's descriptor
                 --- all have sent ---
                 takes what has arrived, which is all, and maps it
                 --- what went wrong, if anything: then all raise ---

So nobody waits for a message of a rank that may have died: all waiting is the meeting's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from weft._core.arguments import seconds_until
from weft.engines.local.meeting.meeting import (
    MAILBOX_BYTES,
    UNDER_WAY,
    Meeting,
    in_words,
    make_block,
    setup_error,
)
from weft.engines.local.memory.cuda import DeviceSegment, identity
from weft.engines.local.processes.channel import Channel, DeviceMemory, Listener
from weft.errors import DeviceUnavailable, InvalidValue, OutOfMemory, SetupError, WeftError

#: what making or mapping memory of a device may raise
TROUBLES = (WeftError, OSError, RuntimeError)


def map_segments(
    meeting: Meeting, size: int, device: int, deadline: float, *, only: int | None = None
) -> list[DeviceSegment]:
    """Return a segment of at least `size` bytes of each rank, or of rank `only`, mapped for this
    rank's device. All ranks of the meeting take part. Raises SetupError on every rank if one could
    not make or map one."""
    segments: dict[int, DeviceSegment] = {}
    trouble, own = b"", only is None or only == meeting.rank
    if own:
        try:
            segments[meeting.rank] = DeviceSegment.create(size, device)
        except TROUBLES as error:
            trouble = in_words(error)
    raise_any(meeting, trouble, deadline)
    return share_segments(meeting, segments, device, deadline)


def share_segments(
    meeting: Meeting, segments: dict[int, DeviceSegment], device: int, deadline: float
) -> list[DeviceSegment]:
    """Return the segments of all ranks, given those of this one, mapped for this rank's device. All
    ranks take part. Raises SetupError on every rank if one could not map one."""
    trouble = b""
    mine = {rank: (one.descriptor, one.size) for rank, one in segments.items()}
    try:
        received = _exchange(meeting, mine.get(meeting.rank), deadline)
        for rank, (descriptor, length) in received.items():
            segments[rank] = DeviceSegment(descriptor, length, device)
    except TROUBLES as error:
        if isinstance(error, WeftError) and not isinstance(error, DeviceUnavailable | OutOfMemory):
            raise  # of the meeting
        trouble = in_words(error)
    raise_any(meeting, trouble, deadline)
    return [segments[rank] for rank in sorted(segments)]


def raise_any(meeting: Meeting, trouble: bytes, deadline: float) -> None:
    """Raise SetupError on every rank if one has had trouble."""
    troubles = meeting.exchange(UNDER_WAY, trouble, seconds_until(deadline))
    if any(troubles):
        raise setup_error(meeting, troubles)


def device_memory(meeting: Meeting, size: int, device: str, deadline: float, *, what: str) -> Any:
    """Return memory that rank 0 allocates on its device and every rank maps for its own, as a
    tensor of bytes. All ranks take part; `what` it is for, in errors.

    Raises, on every rank, OutOfMemory, and InvalidValue if a rank cannot reach rank 0's GPU. For a
    device that is the host ("cpu:0") it is shared memory.
    """
    from weft.adapters import torch_arrays

    if not device.startswith("cuda"):
        block = make_block(
            meeting,
            UNDER_WAY,
            leader=meeting.members[0],
            size=size,
            seconds=seconds_until(deadline),
            point="table.made",
        )
        return torch_arrays.over(block.buffer)
    number, trouble = torch_arrays.number_of(device), b""
    segments: dict[int, DeviceSegment] = {}
    own = identity_of(device)
    if meeting.rank == 0:
        try:
            segments[0] = DeviceSegment.create(size, number)
        except OutOfMemory as error:
            trouble = b"!" + in_words(error)
        except TROUBLES as error:
            trouble = b"-" + in_words(error)
    trouble = trouble[:MAILBOX_BYTES]
    first, *_ = meeting.exchange(UNDER_WAY, trouble, seconds_until(deadline))
    if first:
        text = first[1:].decode(errors="replace")
        raise (OutOfMemory if first[:1] == b"!" else SetupError)(f"{what}: {text}")
    identities = meeting.exchange(UNDER_WAY, own, seconds_until(deadline))
    try:
        [segment] = share_segments(meeting, segments, number, deadline)
    except SetupError as error:
        others = [rank for rank, one in enumerate(identities) if one != identities[0]]
        if not others:
            raise
        raise InvalidValue(
            f"{what} lies on the GPU of rank 0, {identities[0].decode()}, and not all of ranks "
            f"{others}, which have other GPUs, can reach its memory: {error}; use device='cpu', or "
            "have all ranks share a GPU (weft run --gpus 0)"
        ) from error
    tensor = segment.tensor()
    segment.close_descriptor()
    return tensor


def identity_of(device: str) -> bytes:
    """Return what distinguishes a GPU from others."""
    from weft.adapters import torch_arrays

    try:
        return identity(torch_arrays.number_of(device)).encode()
    except TROUBLES as error:
        return in_words(error)


def _exchange(
    meeting: Meeting, mine: tuple[int, int] | None, deadline: float
) -> Mapping[int, tuple[int, int]]:
    """Send every other rank the descriptor and the size of this rank's segment, if it has one.
    Return what the others have sent. Raises DeviceUnavailable for what went wrong here."""
    name = f"{os.geteuid()}/device/{os.urandom(8).hex()}"
    listener, trouble = Listener(name), ""
    channels: list[Channel] = []
    try:
        offer = name.encode() if mine is None else b"+" + name.encode()
        offers = meeting.exchange(UNDER_WAY, offer, seconds_until(deadline))
        senders = sum(offer.startswith(b"+") for offer in offers) - (mine is not None)
        try:
            for rank, other in enumerate(offers):
                if mine is not None and rank != meeting.rank:
                    channel = Channel.connect(other.decode().removeprefix("+"))
                    channels.append(channel)
                    channel.send(DeviceMemory(meeting.rank, mine[1]), [mine[0]])
        except (OSError, WeftError) as error:
            trouble = f"{type(error).__name__}: {error}"
        meeting.meet(UNDER_WAY, seconds_until(deadline))
        received = {}
        for _ in range(senders):
            rank, descriptor, size = _take(listener)
            received[rank] = descriptor, size
        if trouble:
            raise DeviceUnavailable(trouble)
        return received
    finally:
        _close(listener, channels)


def _take(listener: Listener) -> tuple[int, int, int]:
    channel = listener.accept()
    if channel is None:
        raise DeviceUnavailable("the descriptor of another rank's device memory did not arrive")
    try:
        message, descriptors = channel.receive(DeviceMemory)
        return message.rank, descriptors[0], message.size
    finally:
        channel.close()


def _close(listener: Listener, channels: Sequence[Channel]) -> None:
    for channel in channels:
        channel.close()
    listener.close()
