"""Calls whose tensors have the same layout, and the replay of a further one of them, whatever its kernels are.

Such calls share everything that follows from the layout: compiled kernels, numbers, the outputs' strides. A call that only allocates and
launches is replayed: its tensors are allocated, and each launch is started with the new addresses.
Each family starts a launch in its own way: by Triton's launcher (launch.py), cuDNN's execution of a plan, functions that
flash_attn compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch

from attn_compiler.lowerings.shared.launching.dry_run import noter, recorder
from attn_compiler.lowerings.shared.launching.on_device import Empty, KnownCalls
from attn_compiler.torch_private.compat import current_cuda_device

#: bytes that a thread may load at once
VECTOR = 16
#: bits that are 0 in the address of a tensor that begins at a vector
BETWEEN = VECTOR - 1

T = TypeVar("T")

#: Starts a launch on the current device, given all tensors of a call and their addresses. The inputs come first, then the allocated
#: tensors.
Start = Callable[[list[torch.Tensor], list[int]], object]

#: Names of the tensors that a call returns: an output and its lse, which is None where nobody reads it; or three gradients and a list of
#: operands' gradients.
Returned = tuple[str, str | None] | tuple[str, str, str, list[str]]


class Ready(Protocol):
    """A launch that was made once, with the data for a further one."""

    def bound(self, index: Mapping[str, int], device: int) -> Start:
        """Return the launch on a device by its index. index: of tensors, by the names that the launch has for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A call that allocates and launches, and does nothing else.

    device: its index, −1 for a CPU.
    allocate: makes a tensor each, on the current device.
    launch: starts all launches, in order.
    returned: selects the results of the call from all tensors.
    """

    device: int
    allocate: tuple[Callable[[], torch.Tensor], ...]
    launch: Start
    returned: Callable[[list[torch.Tensor]], Any]

    def run(self, tensors: list[torch.Tensor], between: int = 0) -> Any:
        """Run the call, and return its results. tensors: inputs with the layout of the first call's; the call appends the tensors that it
        allocates.

        between: bits of addresses. If an input's address has any of them, nothing is done, and None is returned.
        """
        if current_cuda_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(tensors, between)
        # One loop instead of comprehensions: the host's time counts here.
        bits, addresses = 0, []
        for x in tensors:
            address = x.data_ptr()
            bits |= address
            addresses.append(address)
        if bits & between:
            return None
        for make in self.allocate:
            made = make()
            tensors.append(made)
            addresses.append(made.data_ptr())
        self.launch(tensors, addresses)
        return self.returned(tensors)


@dataclass(kw_only=True)
class CallCache:
    """Calls of an op with one text, whose tensors have the same shapes, strides, dtypes, device and alignment.

    launches: prepared launches, by the family's own key.
    empties: allocations of a call, by name.
    facts: other values that follow from the tensors' layout.
    replay: for further calls, if a call only allocates and launches.
    any_size: other calls of the text have other sizes, and share their kernels (any_size.py).
    """

    device: torch.device
    any_size: bool = False
    launches: dict[Any, Any] = field(default_factory=dict)
    empties: dict[str, Empty] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    replay: Replay | None = None

    def empty(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return make(), or an unfilled tensor like its first result. Allocates on the current device."""
        known = self.empties.get(name)
        if known is not None:
            return known.make()
        made = make()
        taker = recorder()
        if taker is not None:
            taker.allocated(made)
            return made
        self.empties[name] = Empty.like(made)
        return made

    def fact(self, name: str, find: Callable[[], T]) -> T:
        """Return find(), called once: a value that follows from the tensors' layout."""
        if name not in self.facts:
            self.facts[name] = find()
        return cast(T, self.facts[name])

    def keep(self, ran: Sequence[Ready | None], *, inputs: Iterable[str], returned: Returned) -> None:
        """Replay further calls on a GPU, if every launch is ready. ran: the launches of a call, in order. inputs: names of tensors."""
        ready = [one for one in ran if one is not None]
        if self.device.index is not None and len(ready) == len(ran):
            # Another thread may be in its first call, too, and add entries.
            self.replay = replay_of(self.device, ready, dict(self.empties), inputs=inputs, returned=returned)


def replay_of(
    device: torch.device,
    ready: Sequence[Ready],
    empties: Mapping[str, Empty],
    *,
    inputs: Iterable[str],
    returned: Returned,
) -> Replay:
    """Build the replay of a call. empties: its allocations. inputs: names of tensors."""
    at = -1 if device.index is None else device.index
    index = {name: i for i, name in enumerate([*inputs, *empties])}
    return Replay(
        device=at,
        allocate=tuple(empty.make for empty in empties.values()),
        launch=_all([one.bound(index, at) for one in ready]),
        returned=_taking(returned, index),
    )


def _all(launches: Sequence[Start]) -> Start:
    """Combine launches, to be started in order."""
    if len(launches) == 1:
        return launches[0]

    def launch(tensors: list[torch.Tensor], addresses: list[int]) -> None:
        for start in launches:
            start(tensors, addresses)

    return launch


def _taking(returned: Returned, index: Mapping[str, int]) -> Callable[[list[torch.Tensor]], Any]:
    """Return a function that selects the returned tensors from all."""
    places = [index[name] for name in returned if isinstance(name, str)]
    last = returned[-1]
    if last is None:
        (out,) = places
        return lambda tensors: (tensors[out], None)
    if isinstance(last, str):
        return operator.itemgetter(*places)
    first, second, third = places
    further = [index[name] for name in last]
    return lambda tensors: (tensors[first], tensors[second], tensors[third], [tensors[i] for i in further])


def flat(returned: Iterable[Any]) -> list[Any]:
    """Flatten the lists among a call's results, or among their names."""
    return [one for x in returned for one in (x if isinstance(x, list) else [x])]


_CACHES: KnownCalls[CallCache] = KnownCalls()


def call_cache(op: str, text: str, tensors: Sequence[torch.Tensor]) -> CallCache:
    """Return the data that earlier calls of an op with this text left, on tensors of the same layout.

    A call whose launches are recorded has stand-ins for tensors: it reads nothing and leaves nothing.
    """
    if noter() is not None or recorder() is not None:
        return CallCache(device=tensors[0].device)
    bits = 0
    lying: list[Any] = [op, text, tensors[0].get_device()]
    for x in tensors:
        bits |= x.data_ptr()
        lying += (x.shape, x.stride(), x.dtype)
    if bits % VECTOR:
        lying += [x.data_ptr() % VECTOR for x in tensors]
    found = _CACHES.get(key := tuple(lying))
    return _CACHES.keep(key, CallCache(device=tensors[0].device)) if found is None else found
