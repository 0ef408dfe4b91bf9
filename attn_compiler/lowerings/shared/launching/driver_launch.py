"""Launch of a compiled Triton kernel by the driver's own function, with all arguments but the addresses and the stream packed in advance.

Triton's launcher reads every argument of a kernel in each call. This module packs the numbers once. Triton's launcher still runs launches
that this module can't describe: descriptors of the copy engine, clusters and memory for a profiler. It also runs launches that the driver
refuses. Imports triton, so this module is imported late.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton

from attn_compiler.lowerings.shared.launching.replaying import Start
from attn_compiler.torch_private.compat import allocator

#: bytes reserved for one parameter: no packed parameter is larger
_PLACE = 8
#: struct formats of floats
_FLOATS = {"fp32": "<f", "f32": "<f", "fp64": "<d"}
_WHOLE = re.compile(r"[iu](1|8|16|32|64)")
_PARAMETER = re.compile(r"\.param\b")
#: number of values that the bytes of one parameter can hold
_NUMBERS = 1 << 8 * _PLACE


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute. Each value set here is one int, of a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_BEGINS_EARLY = 6


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.cache
def driver() -> Callable[..., int] | None:
    """Return cuLaunchKernelEx, which releases Python's lock; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library.cuLaunchKernelEx


def bound(
    compiled: Any,
    grid: tuple[int, int, int],
    device: int,
    values: Sequence[Any],
    where: Sequence[tuple[int, int]],
    count: int,
    otherwise: Start,
) -> Start:
    """Return a launch on a device by its index; `otherwise` where the kernel needs an argument that is not described here.

    values: of the kernel's parameters. where: of each address the parameter, and its number among the `count` addresses of the call.
    otherwise: the same launch by Triton's launcher. It runs where a profiler hooks into launches, and where the driver refuses the launch:
    a thread may have no context yet, or an error may have come before.
    """
    run, given = driver(), dict(where)
    parameters = None if run is None else _parameters(compiled, values, given)
    if run is None or parameters is None:
        return otherwise
    # The addresses of the call come first, in its own order, so that one call writes them. Numbers and a kernel's own memory follow.
    scratch = count + len(parameters)
    places = (ctypes.c_uint64 * (scratch + 2))()
    at = [place if address is None else address for place, (_, address) in enumerate(parameters, count)]
    for place, (number, _) in enumerate(parameters, count):
        places[place] = number
    begin = ctypes.addressof(places)
    # The array of pointers keeps `places` alive.
    pointers = (ctypes.c_void_p * (len(at) + 2))(*(begin + _PLACE * place for place in (*at, scratch, scratch + 1)))
    config = _config(compiled, grid)
    at_config, function = ctypes.byref(config), ctypes.c_void_p(compiled.function)
    size = compiled.metadata.global_scratch_size * math.prod(grid)
    room = allocator((size,), (1,), torch.int8, "cuda") if size else None
    hooks, stream_of = triton.knobs.runtime, triton.runtime.driver.active.get_current_stream
    write = struct.Struct(f"={count}Q").pack_into
    # Two threads may run the same compiled code. When the driver returns it has copied the arguments.
    alone = threading.Lock()

    def launch(tensors: list[torch.Tensor], addresses: list[int]) -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            otherwise(tensors, addresses)
            return
        memory = None if room is None else room()
        with alone:
            write(places, 0, *addresses)
            if memory is not None:
                places[scratch] = memory.data_ptr()
            config.stream = stream_of(device)
            failed = run(at_config, function, pointers, None)
        if failed:
            otherwise(tensors, addresses)

    return launch


def _config(compiled: Any, grid: tuple[int, int, int]) -> _Config:
    metadata = compiled.metadata
    early = (_Attribute * 1)(_Attribute(id=_BEGINS_EARLY, value=1))
    return _Config(
        grid=grid,
        block=(32 * metadata.num_warps, 1, 1),
        shared=metadata.shared,
        attributes=early,
        count=int(metadata.launch_pdl),
    )


def _parameters(compiled: Any, values: Sequence[Any], given: dict[int, int]) -> list[tuple[int, int | None]] | None:
    """Return the bits of each parameter of the machine code, and which address it is, if any. None where one is not described here."""
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.profile_scratch_size:
        return None
    found: list[tuple[int, int | None]] = []
    for i, (kind, value) in enumerate(zip(compiled.src.signature.values(), values, strict=True)):
        for one, number in _flat(kind, value):
            bits = _bits(one, number)
            if bits is None:
                return None
            found.append((bits, given.get(i)))
    # Triton adds two parameters: for a kernel's own memory and for a profiler.
    code = compiled.asm["ptx"]
    begin = code.index(".entry")
    declared = _PARAMETER.findall(code[begin : code.index(")", begin)])
    return found if len(declared) == len(found) + 2 else None


def _flat(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters, with their types, that a parameter of the source expands to. Constants are none."""
    if isinstance(kind, tuple):
        yield from itertools.chain.from_iterable(map(_flat, kind, value))
    elif kind != "constexpr":
        yield kind, value


def _bits(kind: str, value: Any) -> int | None:
    """Return the bits of a value of a type. None: of a type that is not described here."""
    if kind.startswith("*"):
        return 0
    if kind in _FLOATS:
        return int.from_bytes(struct.pack(_FLOATS[kind], value), "little")
    return int(value) % _NUMBERS if _WHOLE.fullmatch(kind) else None
