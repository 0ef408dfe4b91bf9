"""Invariants of a rewritten graph."""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.reasons.errors import VerifyFailed
from attn_compiler.torch_private import symbols as torch_symbols


def verify_graph(unit: Unit, found: FoundSites) -> None:
    """Raise VerifyFailed if the graph is malformed, or a site's value changed in shape, dtype or device."""
    if not unit.options.check_invariants:
        return
    try:
        unit.graph.lint()
    except RuntimeError as error:
        raise VerifyFailed(
            pass_name="lower",
            site=unit.name or "the graph",
            invariant="every node is defined before it is used",
            observed=str(error),
        ) from error
    for site in found.sites:
        if site.new_out is not None:
            _check_output(site, site.new_out)


def _check_output(site: Site, new_out: fx.Node) -> None:
    before: torch.Tensor = site.match.out.meta["val"]
    after: torch.Tensor = new_out.meta["example_value"]
    if _differs(before, after):
        raise VerifyFailed(
            pass_name="lower", site=site.module, invariant=f"the output is {_words(before)}", observed=_words(after)
        )


def _differs(before: torch.Tensor, after: torch.Tensor) -> bool:
    if (before.dtype, before.device, before.dim()) != (after.dtype, after.device, after.dim()):
        return True
    # Equal sizes may be spelled differently: s0**2 // s0.
    return not all(torch_symbols.statically_known(a == b) for a, b in zip(before.shape, after.shape, strict=True))


def _words(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"
