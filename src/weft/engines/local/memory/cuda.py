"""Memory of a GPU that several processes map, and memory of the host that a GPU reaches.

`DeviceSegment`: memory of one GPU, as memfds are memory of the host. It has no name; a descriptor
stands for it, travels over Unix sockets, and maps it in other processes. It lives as long as any
mapping or descriptor, whoever dies, and a process may hold the descriptor without using CUDA.

`RegisteredBlock`: a block of shared memory that the GPU reads and writes at the host's speed.

Both are seen as a CUDA tensor of bytes, whose views keep the memory mapped. CUDA's driver is called
by ctypes: torch has no calls for this. It needs torch's context, which exists as soon as torch has
made a tensor on the device.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

from weft.engines.local.memory.segment import Block
from weft.errors import DeviceUnavailable, OutOfMemory

#: what the driver's calls return
_OUT_OF_MEMORY = 2
#: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DESCRIPTOR = 1
#: CU_DEVICE_ATTRIBUTE_MPS_ENABLED
_MPS = 133
#: CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_FOR_DEVICES = 3


class CudaError(DeviceUnavailable):
    """A call of CUDA's driver that failed."""

    def __init__(self, call: str, code: int) -> None:
        self.code = code
        name = ctypes.c_char_p()
        _library().cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
        super().__init__(f"{call} of CUDA's driver: {(name.value or b'error').decode()} ({code})")


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceUnavailable(
            f"CUDA's driver cannot be loaded ({error}); install NVIDIA's driver, or use tensors on "
            "the CPU"
        ) from error


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_library(), name)(*arguments)
    if code:
        raise CudaError(name, code)


class _Location(ctypes.Structure):
    """CUmemLocation: type 1 is a device."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: type 1 is memory that stays where it is."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("unused", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc: flags 3 are reading and writing."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class DeviceSegment:
    """Memory of a GPU, mapped in this process. The descriptor, which other processes need to map
    it, is closed with this object or before."""

    def __init__(self, descriptor: int, size: int, device: int) -> None:
        """Map a descriptor for a device of this process, and take ownership of it."""
        self.descriptor, self.size, self.device = descriptor, size, device
        handle = ctypes.c_ulonglong()
        _call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(descriptor),
            ctypes.c_int(_DESCRIPTOR),
        )
        self._map(handle)

    @classmethod
    def create(cls, size: int, device: int) -> DeviceSegment:
        """Return a new segment of at least `size` bytes of any values. Raises OutOfMemory."""
        import torch

        torch.empty(1, device=f"cuda:{device}")  # makes the context
        segment = cls.__new__(cls)
        segment.descriptor, segment.device = -1, device
        properties = _Properties(1, _DESCRIPTOR, _Location(1, device))
        grain = ctypes.c_size_t()
        _call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(grain),
            ctypes.byref(properties),
            ctypes.c_int(0),
        )
        segment.size = -(-max(size, 1) // grain.value) * grain.value
        handle = ctypes.c_ulonglong()
        arguments = (
            ctypes.byref(handle),
            ctypes.c_size_t(segment.size),
            ctypes.byref(properties),
            ctypes.c_ulonglong(0),
        )
        try:
            _call("cuMemCreate", *arguments)
        except CudaError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            torch.cuda.empty_cache()  # torch may keep for later what is missing here
            segment._create_again(arguments)
        try:
            descriptor = ctypes.c_int(-1)
            _call(
                "cuMemExportToShareableHandle",
                ctypes.byref(descriptor),
                handle,
                ctypes.c_int(_DESCRIPTOR),
                ctypes.c_ulonglong(0),
            )
        except BaseException:
            _library().cuMemRelease(handle)
            raise
        segment.descriptor = descriptor.value
        os.set_inheritable(segment.descriptor, False)
        segment._map(handle)
        return segment

    def _create_again(self, arguments: Sequence[Any]) -> None:
        try:
            _call("cuMemCreate", *arguments)
        except CudaError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            free, total = free_memory(self.device)
            raise OutOfMemory(
                f"{self.size >> 20} MiB of memory of cuda:{self.device}, which has {free >> 20} of "
                f"{total >> 20} MiB free; use smaller arrays, or fewer processes on this GPU"
            ) from error

    def _map(self, handle: ctypes.c_ulonglong) -> None:
        """Map the allocation, and leave it to the mapping to keep it."""
        address, size = ctypes.c_ulonglong(), ctypes.c_size_t(self.size)
        zero = ctypes.c_ulonglong(0)
        try:
            _call(
                "cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero
            )
            try:
                _call("cuMemMap", address, size, ctypes.c_size_t(0), handle, zero)
                access = _Access(_Location(1, self.device), 3)
                _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
            except BaseException:
                _unmap(address.value, self.size)
                raise
        finally:
            _call("cuMemRelease", handle)
        memory = _DeviceMemory(address.value, self.size)
        # the end of the process unmaps what is left
        weakref.finalize(memory, _unmap, address.value, self.size).atexit = False
        self._memory = memory

    def tensor(self) -> Any:
        """Return all of it as a tensor of bytes. The mapping lives as long as views of it."""
        return self._memory.tensor(self.device)

    def close_descriptor(self) -> None:
        """Close the descriptor: no other process can map the segment then; the mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close_descriptor()


class _DeviceMemory:
    """Bytes at an address that a GPU reaches, in the form in which torch takes over such memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    def tensor(self, device: int) -> Any:
        import torch

        return torch.as_tensor(self, device=f"cuda:{device}")


def _unmap(address: int, size: int) -> None:
    """Unmap, once the GPU has done what uses the memory. Called in a finalizer, also when the
    context is gone."""
    library = _library()
    library.cuCtxSynchronize()
    library.cuMemUnmap(ctypes.c_ulonglong(address), ctypes.c_size_t(size))
    library.cuMemAddressFree(ctypes.c_ulonglong(address), ctypes.c_size_t(size))


class RegisteredBlock:
    """A block of shared memory that a GPU of this process reaches too."""

    def __init__(self, block: Block, device: int) -> None:
        import torch

        torch.empty(1, device=f"cuda:{device}")  # makes the context
        address = ctypes.c_ulonglong()
        host = ctypes.c_void_p(block.address)
        _call(
            "cuMemHostRegister_v2",
            host,
            ctypes.c_size_t(block.length),
            ctypes.c_uint(_FOR_DEVICES),
        )
        try:
            _call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), host, ctypes.c_uint(0))
        except BaseException:
            _unregister(block.address, block.buffer)
            raise
        self._memory, self._device = _DeviceMemory(address.value, block.length), device
        # the buffer, so that the block stays mapped until it is unregistered
        finalizer = weakref.finalize(self._memory, _unregister, block.address, block.buffer)
        finalizer.atexit = False

    def tensor(self) -> Any:
        """Return all of it as a tensor of bytes on the device."""
        return self._memory.tensor(self._device)


def _unregister(address: int, buffer: object) -> None:
    _library().cuCtxSynchronize()
    _library().cuMemHostUnregister(ctypes.c_void_p(address))


# facts about a device


def free_memory(device: int) -> tuple[int, int]:
    """Return how many bytes of a device are free, and how many it has."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def identity(device: int) -> str:
    """Return what distinguishes a GPU from all others, also in other processes."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def is_shared_by_mps(device: int) -> bool:
    """Return whether processes use a device at once, through NVIDIA's MPS, and not by turns."""
    value = ctypes.c_int()
    code = _library().cuDeviceGetAttribute(
        ctypes.byref(value), ctypes.c_int(_MPS), ctypes.c_int(device)
    )
    return code == 0 and bool(value.value)
