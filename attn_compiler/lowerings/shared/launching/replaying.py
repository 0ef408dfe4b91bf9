"""Calls that lie alike, and how a further one of them is replayed, whatever its kernels are.

Calls whose tensors lie alike share what follows from that: compiled kernels, numbers, the outputs' strides. Where a call does nothing
but allocate and launch, a further one is replayed: its tensors are allocated, and each launch is started with its own addresses.
How a launch is started is the family's own: by Triton's launcher (launching.py), cuDNN's execution of a plan, functions that
flash_attn compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch

from attn_compiler.lowerings.shared.launching.noting import noter
from attn_compiler.lowerings.shared.launching.on_device import Empty, KnownCalls
from attn_compiler.lowerings.shared.launching.recording import recorder
from attn_compiler.torch_private.compat import current_cuda_device

#: bytes whose elements a thread may load at once
VECTOR = 16
#: bits of an address that none has which begins at a vector
BETWEEN = VECTOR - 1

T = TypeVar("T")

#: Starts a launch on the current device, of all tensors of a call and their addresses. They are counted: the inputs, then what is
#: allocated.
Start = Callable[[list[torch.Tensor], list[int]], object]

#: Names of the tensors that a call returns: of an output and its lse, which is None where nobody reads it; or of three gradients and a
#: list of those of operands.
Returned = tuple[str, str | None] | tuple[str, str, str, list[str]]


class Ready(Protocol):
    """A launch that was made once, and what a further one needs of it."""

    def bound(self, index: Mapping[str, int], device: int) -> Start:
        """The launch on a device by its index. index: of tensors, by the names that the launch has for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A call that allocates and launches, and does nothing else.

    device: its index, −1 for a CPU.
    allocate: makes a tensor each, on the current device.
    launch: starts all launches, in order.
    returned: what the call returns, of all tensors.
    """

    device: int
    allocate: tuple[Callable[[], torch.Tensor], ...]
    launch: Start
    returned: Callable[[list[torch.Tensor]], Any]

    def run(self, tensors: list[torch.Tensor], between: int = 0) -> Any:
        """Run the call, and give what it returns. tensors: inputs that lie like those of the first call; the call adds what it allocates.

        between: bits of addresses. Nothing is done, and None is returned, where an input's has any of them.
        """
        if current_cuda_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(tensors, between)
        # One loop, written out: the host's time counts here.
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
class Alike:
    """Calls of an op with one text, whose tensors have the same shapes, strides, dtypes, device and alignment.

    launches: what is ready, by the family's own key.
    empties: what a call allocates, by name.
    facts: what else follows from how the tensors lie.
    replay: for further calls, if that is all there is to them.
    any_size: other calls of the text have other sizes, and share their kernels (any_size.py).
    """

    device: torch.device
    any_size: bool = False
    launches: dict[Any, Any] = field(default_factory=dict)
    empties: dict[str, Empty] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    replay: Replay | None = None

    def empty(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """make(), or an unfilled tensor like the one that it gave first. Allocates on the current device."""
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
        """find(), asked once: something that follows from how the tensors lie."""
        if name not in self.facts:
            self.facts[name] = find()
        return cast(T, self.facts[name])

    def keep(self, ran: Sequence[Ready | None], *, inputs: Iterable[str], returned: Returned) -> None:
        """Replay further calls on a GPU, if every launch is ready. ran: the launches of a call, in order. inputs: names of tensors."""
        ready = [one for one in ran if one is not None]
        if self.device.index is not None and len(ready) == len(ran):
            # Another thread may be in its first call, too, and find further ones.
            self.replay = replay_of(self.device, ready, dict(self.empties), inputs=inputs, returned=returned)


def replay_of(
    device: torch.device,
    ready: Sequence[Ready],
    empties: Mapping[str, Empty],
    *,
    inputs: Iterable[str],
    returned: Returned,
) -> Replay:
    """empties: what is allocated. inputs: names of tensors."""
    at = -1 if device.index is None else device.index
    index = {name: i for i, name in enumerate([*inputs, *empties])}
    return Replay(
        device=at,
        allocate=tuple(empty.make for empty in empties.values()),
        launch=_all([one.bound(index, at) for one in ready]),
        returned=_taking(returned, index),
    )


def _all(launches: Sequence[Start]) -> Start:
    """Starts them in order."""
    if len(launches) == 1:
        return launches[0]

    def launch(tensors: list[torch.Tensor], addresses: list[int]) -> None:
        for start in launches:
            start(tensors, addresses)

    return launch


def _taking(returned: Returned, index: Mapping[str, int]) -> Callable[[list[torch.Tensor]], Any]:
    """Takes what is returned out of all tensors."""
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
    """What a call returns, or its names, without a list in it."""
    return [one for x in returned for one in (x if isinstance(x, list) else [x])]


_ALIKE: KnownCalls[Alike] = KnownCalls()


def alike(op: str, text: str, tensors: Sequence[torch.Tensor]) -> Alike:
    """What earlier calls left of an op with this text, on tensors that lie in the same way.

    A call whose launches are noted or recorded has stand-ins for tensors: it reads nothing and leaves nothing.
    """
    if noter() is not None or recorder() is not None:
        return Alike(device=tensors[0].device)
    bits = 0
    lying: list[Any] = [op, text, tensors[0].get_device()]
    for x in tensors:
        bits |= x.data_ptr()
        lying += (x.shape, x.stride(), x.dtype)
    if bits % VECTOR:
        lying += [x.data_ptr() % VECTOR for x in tensors]
    found = _ALIKE.get(key := tuple(lying))
    return _ALIKE.keep(key, Alike(device=tensors[0].device)) if found is None else found
