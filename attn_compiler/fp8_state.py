"""The state of delayed FP8 scaling, to be saved and loaded: the amax histories that compiled code keeps.

They belong to compiled graphs, not to the model, so `model.state_dict()` does not hold them. Save `fp8_state_dict()` beside it, and
give it to `load_fp8_state_dict` when the model has run once after loading; nothing is compiled again by that.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attn_compiler.errors import Fp8StateMismatch, Fp8StateOutdated

if TYPE_CHECKING:
    import torch

#: names of when q, k and v had histories of their own
_OUTDATED = re.compile(r"/amax_[qkv](#\d+)?$")

_kept: list[tuple[str, weakref.ref[torch.Tensor]]] = []


def keep(label: str, tensor: torch.Tensor) -> None:
    """Know a buffer as long as some compiled graph holds it. label: "model.layers.0.self_attn/amax"."""
    _kept[:] = [(name, ref) for name, ref in _kept if ref() is not None]
    _kept.append((label, weakref.ref(tensor)))


def forget() -> None:
    """Know no buffer any more: their graphs will not run again, though an output whose gradient may still be asked for holds them."""
    _kept.clear()


def fp8_state_dict() -> dict[str, torch.Tensor]:
    """Copies of all histories, float32 (amax_history_len, n), newest first, for n magnitudes of q, then of k and v. By module path; what
    a path has several of (a graph for training and one for inference, or layers that are compiled one by one) is numbered in the order
    of compilation: "path/amax", "path/amax#2"."""
    return {name: tensor.detach().clone() for name, tensor in _live().items()}


def load_fp8_state_dict(state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Write saved histories into those that there are. strict: names have to be the same; else those on both sides are loaded, such as a
    training graph's before one for inference was compiled. Raises Fp8StateMismatch if they are not, or shapes differ, Fp8StateOutdated if
    it was an earlier version that saved them; nothing is written then."""
    live = _live()
    outdated = sorted(name for name in state if _OUTDATED.search(name))
    if outdated:
        wanted = tuple(f"{name!r} {tuple(tensor.shape)}" for name, tensor in live.items())
        raise Fp8StateOutdated(given=tuple(outdated), wanted=wanted)
    if strict and live.keys() != state.keys():
        unknown, missing = sorted(state.keys() - live.keys()), sorted(live.keys() - state.keys())
        raise Fp8StateMismatch(problem=f"not there: {unknown or 'none'}; not given: {missing or 'none'}")
    pairs = {name: (tensor, state[name]) for name, tensor in live.items() if name in state}
    for name, (tensor, given) in pairs.items():
        if given.shape != tensor.shape:
            raise Fp8StateMismatch(problem=f"{name} is {tuple(tensor.shape)}, given is {tuple(given.shape)}")
    for tensor, given in pairs.values():
        tensor.detach().copy_(given)


def _live() -> dict[str, torch.Tensor]:
    # Graphs of models that are gone are cycles, and would still count in the names.
    gc.collect()
    found: dict[str, torch.Tensor] = {}
    for label, ref in _kept:
        tensor = ref()
        if tensor is not None:
            count = sum(name == label or name.startswith(f"{label}#") for name in found)
            found[f"{label}#{count + 1}" if count else label] = tensor
    return found
