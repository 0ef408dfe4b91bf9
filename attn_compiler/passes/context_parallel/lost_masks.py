"""Parts of a mask that code around a graph may have left out, because it saw a rank's part of the sequence.

A model that makes its masks around its layers leaves out a window that is wider than the sequence it is given, and finds no second
document where each rank has one. A layer that is compiled by itself is told "causal" then. Modules of transformers tell the window
themselves; the user tells that there are documents (`packed`).
"""

from __future__ import annotations

from typing import Any

from attn_compiler import index_expr as ix
from attn_compiler.passes.context_parallel.places import CannotShard
from attn_compiler.passes.context_parallel.whole import Wholes
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.recovering import kinds
from attn_compiler.torch_private import frames as torch_frames

#: the name in ContextParallel(allow=...) for modules that mean something else by these attributes
WINDOW = "window"

#: the beginning of a layer's kind in transformers -> the name of the window in its module or configuration
_WINDOWS = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
_WHOLE_MODEL = "compile the whole model in one graph, which makes the mask there"
_CAUSAL = ix.compare("<=", ix.Index("k"), ix.Index("q"))


def check_window(mirror: Mirror, site: Site, length: int) -> None:
    """Raise CannotShard where the module has a window within the whole sequence, and the mask has none. length: of the whole sequence."""
    owner = mirror.owner(site.match.out)
    if owner is None or _relates_positions(site):
        return
    module = torch_frames.owner_of(owner.meta.get("nn_module_stack"))
    found = named_window(module)
    if found is None or found[1] >= length:
        if any(width < length for width in _windows(module)):
            # This layer's code must not serve another layer of the model, which has the window.
            torch_frames.guard_modules()
        return
    raise CannotShard(
        "an attention has the window that its module names",
        f"{found[0]} is {found[1]} of {length} positions, and the mask has no window: the model may have left it out for a part",
        at=site.match.out,
        remedy=f"{_WHOLE_MODEL}; if this attention has no window, give ContextParallel(..., allow=({WINDOW!r},))",
    )


def check_documents(site: Site, wholes: Wholes) -> None:
    """Raise CannotShard where the mask reads no tensor that holds the sequence: it does not tell documents apart."""
    names = () if site.condition is None else site.condition.facts.tensors
    if not any(wholes.is_shared(site.loads[name]) for name in names):
        raise CannotShard(
            "attention of packed documents reads where they begin",
            "its mask reads nothing of the sequence",
            at=site.match.out,
            remedy=f"{_WHOLE_MODEL} of position_ids, without attention_mask; for one document a row, leave packed=True out",
        )


def named_window(module: Any) -> tuple[str, int] | None:
    """Return the window of a module of transformers, with its name; None if the module has none, or is another library's."""
    config = getattr(module, "config", None)
    kind = _kind(module, config)
    for begins, name in _WINDOWS.items():
        if kind is not None and not kind.startswith(begins):
            continue
        value = getattr(module, name, getattr(config, name, None))
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return name, value
    return None


def _windows(module: Any) -> list[int]:
    """Return the windows of all layers."""
    config = getattr(module, "config", None)
    values = [getattr(config, name, None) for name in _WINDOWS.values()]
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


def _kind(module: Any, config: Any) -> str | None:
    """Return "sliding_attention", "full_attention" ...; None where the configuration does not list the layers' kinds."""
    every, at = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if not isinstance(every, (list, tuple)) or not isinstance(at, int) or not 0 <= at < len(every):
        return None
    return str(every[at])


def _relates_positions(site: Site) -> bool:
    """Return whether the mask relates queries and keys by more than that keys come before queries."""
    parts = () if site.condition is None else kinds.conjuncts(site.condition)
    return any({"q", "k"} <= part.facts.indices and part != _CAUSAL for part in parts)
