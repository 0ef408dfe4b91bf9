"""Copies for a run without side effects: of graphs, which the compiler owns, and of inputs, which graphs write to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from attn_compiler.torch_private import compat as torch_compat


def copied_module(module: fx.GraphModule, graphs: Mapping[fx.GraphModule, fx.Graph]) -> fx.GraphModule:
    """Copy a graph module with its graph in `graphs`, else with a copy of its own; nested bodies likewise."""
    graph = graphs.get(module)
    copy = fx.GraphModule(module, graph if graph is not None else torch_compat.copied_graph(module.graph))
    copy.meta.update(module.meta)
    for target in {str(n.target) for n in copy.graph.nodes if n.op == "get_attr"}:
        body = getattr(copy, target, None)
        if isinstance(body, fx.GraphModule):
            setattr(copy, target, copied_module(body, graphs))
    return copy


def isolated(args: Sequence[Any], shared: Sequence[bool]) -> list[Any]:
    """Copy tensors with the same elements, strides and aliasing as those of `args`, in separate memory.

    shared: True for an input to leave in its memory, because nothing writes to it. Other values stay. No tensor of the result requires
    grad.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    return [
        (x.detach() if keep else _isolated(x.detach(), storages)) if isinstance(x, torch.Tensor) else x
        for x, keep in zip(args, shared, strict=True)
    ]


def _isolated(x: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if x.layout != torch.strided or torch_compat.is_wrapper_subclass(x) or x.is_conj() or x.is_neg():
        return x.clone()
    old = x.untyped_storage()
    # Two tensors alias each other if their storages start at one address, even as separate objects.
    key = old.data_ptr() if old.nbytes() else id(x)
    if key not in storages:
        storages[key] = old.clone()  # type: ignore[no-untyped-call]
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return empty.set_(storages[key], x.storage_offset(), x.shape, x.stride())


def is_trained_parameter(x: object) -> bool:
    """Return True if autograd itself would refuse most writes to the tensor."""
    return isinstance(x, nn.Parameter) and x.requires_grad


def share_memory(args: Sequence[Any], written: Sequence[bool]) -> bool:
    """Return True if a floating tensor that may be written to aliases another one: in a wider dtype it would not."""
    seen: dict[int, bool] = {}
    for x, is_written in zip(args, written, strict=True):
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or torch_compat.is_wrapper_subclass(x):
            continue
        if not (x.is_floating_point() or x.is_complex()):
            continue
        memory = x.untyped_storage().data_ptr()
        if memory and memory in seen and (is_written or seen[memory]):
            return True
        if memory:
            seen[memory] = seen.get(memory, False) or is_written
    return False


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The generators of a run without side effects, with their states before it."""

    states: Callable[[], list[torch.Tensor]]
    before: list[torch.Tensor]

    @property
    def any(self) -> bool:
        """True if random numbers were drawn so far."""
        return not all(map(torch.equal, self.before, self.states()))


@contextlib.contextmanager
def leaving_no_trace(
    args: Sequence[Any], devices: Sequence[torch.device], *, gradients: bool = False
) -> Iterator[Drawn]:
    """Run with or without gradients, and restore the random state afterwards. That covers the default generators of the CPU and of
    `devices`, and the generators among `args`."""
    generators = [x for x in args if isinstance(x, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    others = [device for device in devices if device.type not in ("cpu", "meta")]

    def now() -> list[torch.Tensor]:
        of_devices = [torch.get_device_module(device).get_rng_state(device) for device in others]
        return [torch.get_rng_state(), *of_devices, *(generator.get_state() for generator in generators)]

    kinds = {device.type for device in devices} - {"cpu", "meta"}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for kind in kinds:
                own = [device for device in devices if device.type == kind]
                stack.enter_context(torch.random.fork_rng(devices=own, device_type=kind))
            stack.enter_context(torch.set_grad_enabled(gradients))
            yield Drawn(states=now, before=now())
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
