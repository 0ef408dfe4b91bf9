"""Comparison of one lowered site's gradients with the model's own, by the rule for outputs.

Inputs are the model's own values at the site, and the gradient of the site's output in its own backward. Gradients are taken with respect
to the tensors that the rewritten graph reads directly, such as k above `repeat_kv`. Exact, and the model's own: the model's operations from
those tensors to the output, in a wider dtype and in their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph.site import Site
from attn_compiler.spec.numerics import exact_dtype
from attn_compiler.verifying import comparing, masks, outputs, recomputing
from attn_compiler.verifying.comparing import Compared, Rule, Words
from attn_compiler.verifying.interpreting import Autocast
from attn_compiler.verifying.numbers import Noise, fused_noise
from attn_compiler.verifying.values import Body, Key, NoValueError, Values


@dataclass(kw_only=True)
class Given:
    """Inputs of a site's check. autocast: of the site. gradient: of the site's output, once it came. values: the check's needs, as they
    were when the model's site had run, outside of autograd's graph. trained: those that need a gradient."""

    autocast: Autocast
    values: Values | None = None
    trained: Sequence[Key] = ()
    gradient: torch.Tensor | None = None


def read(site: Site, body: Body, new_out: fx.Node | None, values: Values) -> None:
    """Read the inputs of `check_site_gradients`. Raises NoValueError."""
    outputs.read(site, body, new_out, values)
    if new_out is None or body.mirror.dynamo_node(site.match.out) is None or values.leaf(site.match.out) is None:
        raise NoValueError("the site's output exists only inside one call of the graph")
    leaves = {key.name: values.read(key) for key in operands(body, new_out, values)}
    recomputing.output(site, body, values, leaves=leaves)


def operands(body: Body, new_out: fx.Node, values: Values) -> list[Key]:
    """Return the values that the rewritten graph reads at the site, and the model's own mirror has too. Raises NoValueError."""
    wanted = values.needs(lambda rehearsed: rehearsed.rewritten(body, new_out))
    found = [key for key in sorted(wanted, key=str) if key.body == body.index and key.name in body.named]
    if len({key.name for key in found}) < len(found):
        raise NoValueError("an operand is read at two times, between which something writes to it")
    return found


def check_site_gradients(site: Site, body: Body, new_out: fx.Node, given: Given) -> Compared:
    """Compare the gradients. Raises VerificationMismatch, or NoValueError."""
    if given.values is None or given.gradient is None:
        raise NoValueError("no gradient came to the site's output")
    values = given.values
    known = operands(body, new_out, values)
    keys = [key for key in known if key in given.trained]
    if not keys:
        raise NoValueError("no operand of the site needs a gradient")
    own_out = values.mirror(site.match.out)
    rows = outputs.kept_rows(site, values, own_out)
    gradient = given.gradient if rows is None else torch.where(rows, given.gradient, 0.0)
    rounded = comparing.coarsest([own_out.dtype, *(values.recorded[key].dtype for key in keys)])
    exact_dtypes = {exact_dtype(values.recorded[key].dtype) for key in keys}
    wide = torch.float64 if torch.float64 in exact_dtypes else torch.float32

    def model(dtype: torch.dtype | None, noise: Noise | None) -> list[torch.Tensor | None]:
        def make(leaves: Mapping[Key, torch.Tensor]) -> torch.Tensor:
            named = {key.name: x for key, x in leaves.items()}
            with given.autocast.enter(none=dtype is not None):
                return recomputing.output(site, body, values, dtype=dtype, noise=noise, leaves=named)

        with fused_noise(noise, rounded):
            return _through(make, values, known, keys, gradient, dtype)

    def rewritten(leaves: Mapping[Key, torch.Tensor]) -> Any:
        return dataclasses.replace(values, recorded={**values.recorded, **leaves}).rewritten(body, new_out)

    with given.autocast.enter():
        new = _through(rewritten, values, known, keys, gradient)
    lowering = site.decision.lowering if site.decision is not None else "the kernel"

    def names() -> list[str]:
        return [f"gradient of {lowering} with respect to {_named(key, site, body)}" for key in keys]

    rule = Rule(factor=outputs.factor(site), rounded=rounded)
    words = Words(names=names, site=site.module, formula=masks.formula(site))
    return comparing.compare(new, model(None, None), lambda noise: model(wide, noise), rule, words)


def _through(
    make: Callable[[Mapping[Key, torch.Tensor]], Any],
    values: Values,
    known: Sequence[Key],
    keys: Sequence[Key],
    gradient: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor | None]:
    """Return the gradients of `make` of the known values, with respect to those of `keys`. dtype: of all floating values, None: their
    own."""
    made = {key: recomputing.in_dtype(values.recorded[key], dtype) for key in known}
    leaves = {key: made[key].detach().requires_grad_() for key in keys}
    with torch.enable_grad():
        out = make(made | leaves)
    if not out.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(out, list(leaves.values()), gradient.to(out.dtype), allow_unused=True))


def _named(key: Key, site: Site, body: Body) -> str:
    """Return a value's role at the site, and its name in the model's own graph."""
    inside = recomputing.made_of({key.name}, site, body)
    match = site.match
    roles = {"q": match.q.node, "k": match.k.node, "v": match.v.node}
    found = [role for role, node in roles.items() if node in inside or body.names.get(node) == key.name]
    return f"{' and '.join(found)} ({key.name})" if found else key.name
