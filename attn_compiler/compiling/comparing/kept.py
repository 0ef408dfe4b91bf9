"""State of a model and its inputs, saved before a run, so that each run begins alike and the model is as it was in the end."""

from __future__ import annotations

import collections
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from attn_compiler.reasons.errors import CannotCompare
from attn_compiler.torch_private import tracing as torch_tracing
from attn_compiler.verifying.comparing import is_plain
from attn_compiler.verifying.interpreting import isolated

#: containers that can be emptied and refilled; a subclass may not allow it
_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque)
#: inputs that a call can't write to
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def modules_of(model: Callable[..., Any]) -> list[nn.Module]:
    """Return the modules that a call of `model` may run: itself, the object of a method, and those that a function holds."""
    if isinstance(model, nn.Module):
        return list(model.modules())
    if isinstance(model, partial):
        return _modules_in([model.func, *model.args, *model.keywords.values()])
    if inspect.ismethod(model):
        return _modules_in([model.__self__])
    if inspect.isfunction(model):
        names = inspect.getclosurevars(model)
        return _modules_in([*names.nonlocals.values(), *names.globals.values()])
    return []


def _modules_in(values: Sequence[Any]) -> list[nn.Module]:
    held = [value for value in values if isinstance(value, nn.Module | partial) or inspect.ismethod(value)]
    return list(dict.fromkeys(module for value in held for module in modules_of(value)))


class HeldState:
    """Modules as they are now: attributes, and the contents of parameters, buffers and other tensors, copied to the host's memory.

    `give_back` undoes all changes of a run, and `written` is True if there are any. Gradients are laid aside at once, so that runs begin
    without any. Objects of other classes, such as a cache that is an attribute, are not inspected.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        containers = list(_containers([vars(module) for module in modules]))
        self._containers = [_Container.save(one) for one in containers]
        found = {id(x): x for one in containers for x in _values(one) if isinstance(x, torch.Tensor)}
        self.tensors = tuple(found.values())
        self._contents = [_Contents.save(part) for x in self.tensors for part in torch_tracing.plain_tensors(x)]
        self._gradients = [(x, x.grad) for x in self.tensors if x.is_leaf and x.requires_grad]
        self.clear_gradients()

    @property
    def trained(self) -> list[torch.Tensor]:
        """The tensors that a backward gives a gradient."""
        return [x for x, _ in self._gradients]

    def clear_gradients(self) -> None:
        for x, _ in self._gradients:
            x.grad = None

    @property
    def written(self) -> bool:
        """True if anything but gradients changed."""
        return any(one.is_other for one in self._containers) or any(one.is_other for one in self._contents)

    def give_back(self) -> None:
        """Restore all but gradients."""
        for container in self._containers:
            container.give_back()
        for contents in self._contents:
            contents.give_back()

    def give_back_gradients(self) -> None:
        for x, gradient in self._gradients:
            x.grad = gradient


def _containers(found: list[Any]) -> Iterator[Any]:
    """Yield the given containers, and those inside of them, each once."""
    seen: set[int] = set()
    while found:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if type(one) in _CONTAINERS:
            yield one
        if type(one) in (*_CONTAINERS, tuple):
            found.extend(_values(one))


def _values(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


@dataclass(frozen=True, kw_only=True)
class _Container:
    """The contents of a container. The copy holds the same objects."""

    one: Any
    held: Any

    @staticmethod
    def save(one: Any) -> _Container:
        return _Container(one=one, held=copy.copy(one))

    @property
    def is_other(self) -> bool:
        return _identities(self.one) != _identities(self.held)

    def give_back(self) -> None:
        if not self.is_other:
            return
        self.one.clear()
        if isinstance(self.one, dict | set):
            self.one.update(self.held)
        else:
            self.one.extend(self.held)


def _identities(container: Any) -> list[tuple[int, int]]:
    """Return hashes of keys and identities of values: an equal key that is another object is no change."""
    if isinstance(container, dict):
        return [(hash(key), id(value)) for key, value in container.items()]
    return [(0, id(value)) for value in container]


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """The contents of a tensor. memory: its memory under a separate name. saved: a copy in the host's memory; None for a tensor without
    strides or memory."""

    x: torch.Tensor
    memory: torch.Tensor
    saved: torch.Tensor | None

    @staticmethod
    def save(x: torch.Tensor) -> _Contents:
        memory = x.detach()
        known = x.layout == torch.strided and x.device.type != "meta"
        return _Contents(x=x, memory=memory, saved=memory.to("cpu", copy=True) if known else None)

    @property
    def _is_moved(self) -> bool:
        now, then = self.x, self.memory
        return (now.shape, now.dtype, now.device) != (then.shape, then.dtype, then.device) or (
            now.layout == torch.strided and now.data_ptr() != then.data_ptr()
        )

    @property
    def is_other(self) -> bool:
        return self.saved is not None and (self._is_moved or not self._holds_the_same())

    def _holds_the_same(self) -> bool:
        if self.saved is None or self.saved.numel() == 0:
            return True
        return _same_bits(self.memory, self.saved.to(self.memory.device))

    def give_back(self) -> None:
        if self.saved is None:
            return
        if self._is_moved:
            self.x.data = self.memory
        if not self._holds_the_same():
            with torch.inference_mode(self.memory.is_inference()), torch.no_grad():
                self.memory.copy_(self.saved)


def _same_bits(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors are equal, a NaN equal to a NaN."""
    if x.is_floating_point() or x.is_complex():
        return bool(((x == other) | ((x != x) & (other != other))).all())
    return torch.equal(x, other)


class Inputs:
    """The inputs of one call: copies of the user's, which no run writes to. `for_call` gives those that a call may write to."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._leaves, self._form = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._leaves = _copied(self._leaves)
        self.generators = [x for x in self._leaves if isinstance(x, torch.Generator)]
        self._may_write = not all(isinstance(x, (torch.Tensor, torch.Generator, *_CONSTANT)) for x in self._leaves)
        self._given: list[Any] | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in self._leaves if isinstance(x, torch.Tensor)]

    def for_call(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the inputs of the next call, copied anew if a call wrote to them or may have."""
        if self._given is None or self._may_write:
            self._given = _copied(self._leaves)
        args, kwargs = pytree.tree_unflatten(self._given, self._form)
        return args, kwargs

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """The latest call's inputs that a backward gives a gradient, by name."""
        given = self._given or []
        return {
            name: x
            for name, x in zip(self.names, given, strict=True)
            if isinstance(x, torch.Tensor) and x.requires_grad
        }

    @property
    def names(self) -> list[str]:
        """Names of inputs: "input 0" for a positional argument, "input_ids" for a named one, and the path inside containers."""
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(self._leaves, self._form))
        return [_name(path) for path, _ in paths]

    @property
    def words(self) -> list[str]:
        """Each input by its name, with dtype and shape of a tensor, the value of a number, and the class of anything else."""
        return [f"{name} {_described(x)}" for name, x in zip(self.names, self._leaves, strict=True) if x is not None]

    @cached_property
    def padding(self) -> torch.Tensor | None:
        """Padding positions: bool (batch, tokens), True where an input `attention_mask` is 0. None without such an input."""
        mask = dict(zip(self.names, self._leaves, strict=True)).get("attention_mask")
        if (
            not isinstance(mask, torch.Tensor)
            or not is_plain(mask)
            or mask.dim() != 2
            or mask.is_floating_point()
            or mask.is_complex()
        ):
            return None
        found: torch.Tensor = mask.detach().cpu() == 0
        return found if found.any() else None

    def check_writes(self) -> None:
        """Check after a call if it wrote to its inputs, so that later calls get copies."""
        given = self._given or []
        pairs = [(x, y) for x, y in zip(self._leaves, given, strict=True) if isinstance(x, torch.Tensor)]
        self._may_write |= any(
            x.shape != y.shape or (x.layout == torch.strided and not _same_bits(x.detach(), y.detach()))
            for x, y in pairs
        )

    def clear_gradients(self) -> None:
        for x in self.trained.values():
            x.grad = None


def _name(path: Sequence[Any]) -> str:
    side, first, *rest = path
    name = f"input {first.idx}" if side.idx == 0 else str(first.key)
    return name + pytree.keystr(tuple(rest))


def _described(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        dtype = str(x.dtype).removeprefix("torch.")
        return f"{dtype}{list(x.shape)}" + ("" if x.device.type == "cpu" else f" on {x.device}")
    return f"= {x!r}" if isinstance(x, _CONSTANT) else type(x).__name__


def _copied(leaves: Sequence[Any]) -> list[Any]:
    """Copy inputs: tensors as leaves of autograd with the same elements and strides, other objects by copy."""
    tensors = isolated(leaves, [False] * len(leaves))
    others = [None if isinstance(x, (torch.Tensor, torch.Generator)) else x for x in leaves]
    try:
        copies = copy.deepcopy(others)
    except (TypeError, RuntimeError, AttributeError) as error:
        classes = ", ".join(sorted({type(x).__name__ for x in others if not isinstance(x, _CONSTANT)}))
        raise CannotCompare(
            call="compare",
            rule="each call gets a copy of the inputs, so that no call sees what another one wrote",
            observed=f"inputs that can't be copied ({classes}: {error})",
            remedy="Give inputs that copy.deepcopy can copy, or make them in a function that is compared",
        ) from error
    return [
        x.requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf if other is None else other
        for x, leaf, other in zip(tensors, leaves, copies, strict=True)
    ]
