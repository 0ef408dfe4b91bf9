"""The state of delayed FP8 scaling, to be saved and loaded: the amax histories that compiled code keeps.

A history belongs to a module and to a place in its code. All graphs that run that place share it: for training and for inference, of all
shapes. `model.state_dict()` does not hold histories. Save `fp8_state_dict()` beside it. After loading, run the model once and pass the
saved state to `load_fp8_state_dict`; that compiles nothing again.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_compiler.reasons.fp8_errors import Fp8StateInvalid, Fp8StateMismatch, Fp8StateOutdated

if TYPE_CHECKING:
    import torch
    from torch import nn

#: names of earlier versions, in which q, k and v had separate histories
_OUTDATED = re.compile(r"/amax_[qkv](#\d+)?$")
#: parts of a path that compiling or distributing a module adds
_WRAPPERS = ("_orig_mod", "module")


@dataclass(frozen=True, kw_only=True)
class Home:
    """The owner of a history. owner: a module, or a function's code. place: in its code, with a count if it runs several times. kind: the
    meaning of its numbers: a recipe, a size, a device."""

    owner: weakref.ref[Any]
    place: Hashable
    kind: Hashable


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """label: "model.layers.0.self_attn/amax". home: None if no module is known. training: the first graph is for training."""

    label: str
    tensor: weakref.ref[torch.Tensor]
    home: Home | None
    training: bool


_kept: list[_Kept] = []


# ---- for the compilation --------------------------------------------------------------------------------------------


def register(label: str, tensor: torch.Tensor, home: Home | None = None, *, training: bool = False) -> None:
    """Register a buffer for as long as some compiled graph holds it. label: "model.layers.0.self_attn/amax"."""
    _kept[:] = [kept for kept in _kept if kept.tensor() is not None]
    _kept.append(_Kept(label=label, tensor=weakref.ref(tensor), home=home, training=training))


def find(home: Home | None) -> torch.Tensor | None:
    """Return the buffer of that home, if a graph holds one."""
    if home is None or home.owner() is None:
        return None
    found = (kept.tensor() for kept in _kept if kept.home == home)
    return next((tensor for tensor in found if tensor is not None), None)


def others(label: str, home: Home | None, *, training: bool) -> str | None:
    """Return why a graph can't continue an earlier graph's histories of the same module; None if there are none. Without a known module,
    the label decides. To be asked before the graph's own histories are registered."""
    alive = [kept for kept in _kept if kept.tensor() is not None]
    if home is None:
        same = any(kept.home is None and kept.label == label for kept in alive)
        return "it is not known which module they belong to" if same else None
    of_module = [(kept, kept.home) for kept in alive if kept.home is not None and kept.home.owner() is home.owner()]
    if any(known.place == home.place for _, known in of_module):
        return "those are of another recipe, shape or device"
    # Another attention of the same module, after a graph break, has the same mode.
    if of_module and all(kept.training is not training for kept, _ in of_module):
        return "those are of another place in the module's code"
    return None


def forget() -> None:
    """Forget all buffers: their graphs will not run again, though outputs that may still be differentiated hold them."""
    _kept.clear()


# ---- saving and loading ---------------------------------------------------------------------------------------------


def fp8_state_dict(model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Return copies of all histories, float32 (amax_history_len, n), newest first, for n magnitudes of q, then of k and v.

    With a model, those of its modules, each by its path in that model: "model.layers.0.self_attn/amax". That tells apart layers that are
    compiled one by one, and two models. Without one, all histories by the paths of reports, which begin at the compiled module. Several of
    one path are numbered in order of creation: "path/amax", "path/amax#2".
    """
    return {name: tensor.detach().clone() for name, tensor in _live(model).items()}


def load_fp8_state_dict(
    state: Mapping[str, torch.Tensor], model: nn.Module | None = None, *, strict: bool = True
) -> tuple[str, ...]:
    """Write saved histories into the current ones, and return the names of the written ones.

    model: given if it was given to `fp8_state_dict`. strict: names have to be the same on both sides; else those on both sides are written.

    All or nothing: if one history does not fit, none is written. Raises Fp8StateMismatch if names or shapes differ, Fp8StateInvalid for
    values that no history can hold, Fp8StateOutdated if an earlier version saved them.
    """
    live = _live(model)
    outdated = sorted(name for name in state if _OUTDATED.search(name))
    if outdated:
        wanted = tuple(f"{name!r} {tuple(tensor.shape)}" for name, tensor in live.items())
        raise Fp8StateOutdated(given=tuple(outdated), wanted=wanted)
    if strict and live.keys() != state.keys():
        raise Fp8StateMismatch(problem=_differing_names(live, state))
    pairs = {name: (tensor, state[name]) for name, tensor in live.items() if name in state}
    invalid = [f"{name} {problem}" for name, (_, given) in pairs.items() if (problem := _problem(given)) is not None]
    if invalid:
        raise Fp8StateInvalid(problems=tuple(invalid))
    for name, (tensor, given) in pairs.items():
        if given.shape != tensor.shape:
            raise Fp8StateMismatch(problem=f"{name} is {tuple(tensor.shape)}, given is {tuple(given.shape)}")
    _write(list(pairs.values()))
    return tuple(pairs)


def _differing_names(live: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    unknown, missing = sorted(state.keys() - live.keys()), sorted(live.keys() - state.keys())
    problem = f"not there: {unknown or 'none'}; not given: {missing or 'none'}"
    numbered = [name for name in unknown if "#" in name and name.partition("#")[0] in live]
    if not numbered:
        return problem
    return (
        f"{problem}. Names with # that are not there may be of an earlier version, in which each graph of a module had its own history, "
        "or of modules that were compiled one by one: give their model to both functions"
    )


def _problem(given: Any) -> str | None:
    """Return the defect of a saved history, independent of its target; None if it has none."""
    import torch
    from torch._subclasses import FakeTensor

    if not isinstance(given, torch.Tensor) or given.layout != torch.strided:
        return f"is no plain tensor but {type(given).__name__}"
    if given.is_meta or isinstance(given, FakeTensor):
        return "holds no numbers (device meta)"
    if given.dtype != torch.float32:
        return f"is {str(given.dtype).removeprefix('torch.')}"
    wrong = ~given.isfinite() | (given < 0)
    return f"holds {float(given[wrong][0]):g}" if bool(wrong.any()) else None


def _write(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write all tensors or none: fallible steps come first, and an error undoes the writes."""
    staged = [given.detach().to(tensor.device, copy=True) for tensor, given in pairs]
    before = [tensor.detach().clone() for tensor, _ in pairs]
    targets = [tensor.detach() for tensor, _ in pairs]
    try:
        for target, given in zip(targets, staged, strict=True):
            target.copy_(given)
    except BaseException:
        for target, held in zip(targets, before, strict=True):
            target.copy_(held)
        raise


def _live(model: nn.Module | None) -> dict[str, torch.Tensor]:
    # Graphs of deleted models are reference cycles, and would still count in the names.
    gc.collect()
    named = (lambda kept: kept.label) if model is None else _named_in(model)
    found: dict[str, torch.Tensor] = {}
    for kept in _kept:
        tensor, name = kept.tensor(), named(kept)
        if tensor is not None and name is not None:
            count = sum(known == name or known.startswith(f"{name}#") for known in found)
            found[f"{name}#{count + 1}" if count else name] = tensor
    return found


def _named_in(model: nn.Module) -> Callable[[_Kept], str | None]:
    """Name a history by its module's path in a model; None if it belongs to no module of it."""
    paths = {
        module: ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        for path, module in model.named_modules()
    }

    def named(kept: _Kept) -> str | None:
        owner = None if kept.home is None else kept.home.owner()
        if owner is None or owner not in paths:
            return None
        own, _, name = kept.label.rpartition("/")
        return f"{paths[owner] or own}/{name}"

    return named
