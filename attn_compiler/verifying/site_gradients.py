"""The gradients of one lowered site against the model's own, by the rule for outputs: from the values that the model's own graph had there,
and from the gradient that came to the site's output in its own backward.

They are taken with respect to the tensors that the rewritten graph reads in their own places, such as k above `repeat_kv`. Exact, and
the model's own: the model's operations from those tensors to the output, in a wider dtype and in their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.site import Site
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import comparing, masks, outputs
from attn_compiler.verifying.fused_noise import fused_noise
from attn_compiler.verifying.interpreting import Autocast
from attn_compiler.verifying.numbers import Noise, exact_dtype
from attn_compiler.verifying.outputs import FACTOR, FACTOR_SOFTCAP, Compared
from attn_compiler.verifying.values import Body, Key, NoValueError, Values, require_computable


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a site's check is made of. values: with all that it needs, as it was when the model's site had run; none is part of a graph of
    autograd. trained: what of it needed a gradient. gradient: of the site's output. autocast: that it was made in."""

    values: Values
    trained: Sequence[Key]
    gradient: torch.Tensor
    autocast: Autocast


def needs(site: Site, body: Body, new_out: fx.Node | None, values: Values) -> set[Key]:
    """What has to be recorded for `check`. Raises NoValueError where it can't be."""
    found = outputs.needs(site, body, new_out, values)
    if new_out is None or body.mirror.dynamo_node(site.match.out) is None or values.leaf(site.match.out) is None:
        raise NoValueError("the site's output exists only inside one call of the graph")
    leaves = {key.name for key in operands(body, new_out, values)}
    inside = _made_of(_differentiable(leaves, body), site, body)
    waiting = [node for each in outputs.dependents(body.mirror, site.match) for node in each.all_input_nodes]
    seen = set(outputs.dependents(body.mirror, site.match))
    while waiting:
        node = waiting.pop()
        if node in seen or body.names.get(node) in leaves:
            continue
        seen.add(node)
        if node in inside:
            require_computable(node)
            _require_unwritten(node, site, body)
            waiting.extend(node.all_input_nodes)
        else:
            found |= values.needs(node)
    return found


def operands(body: Body, new_out: fx.Node, values: Values) -> list[Key]:
    """The values that the rewritten graph reads at the site, and that the model's own mirror knows too. Raises NoValueError."""
    wanted = values.rewritten_needs(body, new_out)
    found = [key for key in sorted(wanted, key=str) if key.body == body.index and key.name in body.named]
    if len({key.name for key in found}) < len(found):
        raise NoValueError("an operand is read at two times, between which something writes to it")
    return found


def _differentiable(leaves: Set[str], body: Body) -> set[str]:
    """Those that may need a gradient. What is made of others alone, such as a mask of positions, is taken as it was recorded."""
    return {name for name in leaves if _is_floating(body.named[name].meta.get("val"))}


def _is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _require_unwritten(node: fx.Node, site: Site, body: Body) -> None:
    """Raise NoValueError if something writes into a value before the site reads it: the value is computed again without that."""
    writer = mutation.written_between(body.mirror, node, node, site.match.out)
    if writer is not None:
        raise NoValueError(f"{node.name} is written to in place before the site reads it")


def _made_of(leaves: Set[str], site: Site, body: Body) -> set[fx.Node]:
    """The mirror nodes, up to a site's output, that are computed from values recorded under these names."""
    found: set[fx.Node] = set()
    for node in body.mirror.graph.nodes:
        if body.names.get(node) not in leaves and any(
            n in found or body.names.get(n) in leaves for n in node.all_input_nodes
        ):
            found.add(node)
        if node is site.match.out:
            break
    return found


def check(site: Site, body: Body, new_out: fx.Node, given: Given) -> Compared:
    """Compare the gradients. Raises VerificationMismatch, or NoValueError."""
    known = operands(body, new_out, given.values)
    keys = [key for key in known if key in given.trained]
    if not keys:
        raise NoValueError("no operand of the site needs a gradient")
    own_out = given.values.mirror(site.match.out)
    rows = outputs.kept_rows(site, given.values, own_out)
    gradient = given.gradient if rows is None else torch.where(rows, given.gradient, 0.0)
    with given.autocast.again():
        new = _Tape(given.values, known, keys).through(lambda values: values.rewritten(body, new_out), gradient)
    rounded = comparing.coarsest([own_out.dtype, *(given.values.recorded[key].dtype for key in keys)])
    models = _Models(site=site, body=body, given=given, operands=known, keys=keys, gradient=gradient, rounded=rounded)
    outcome = comparing.compare(new, models.own(), models, factor(site), rounded)
    if outcome.differences:
        raise _mismatch(site, [_named(key, site, body) for key in keys], outcome.differences)
    return outcome.compared


def factor(site: Site) -> float:
    return FACTOR if site.spec is None or site.spec.score.softcap is None else FACTOR_SOFTCAP


class _Tape:
    """Values in which those of `keys` are leaves of autograd's graph. dtype: of all operands that are floating, if not their own."""

    def __init__(
        self, values: Values, known: Sequence[Key], keys: Sequence[Key], dtype: torch.dtype | None = None
    ) -> None:
        made = {key: _in_dtype(values.recorded[key], dtype) for key in known}
        self.leaves = [made[key].detach().requires_grad_() for key in keys]
        made |= dict(zip(keys, self.leaves, strict=True))
        self.values = dataclasses.replace(values, recorded={**values.recorded, **made})

    def through(self, make: Any, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        with torch.enable_grad():
            out = make(self.values)
        if not out.requires_grad:
            return [None] * len(self.leaves)
        return list(torch.autograd.grad(out, self.leaves, gradient.to(out.dtype), allow_unused=True))


@dataclass(frozen=True, kw_only=True)
class _Models:
    """The model's own gradients, in several arithmetics. rounded: the coarsest dtype among the operands and the output."""

    site: Site
    body: Body
    given: Given
    operands: Sequence[Key]
    keys: Sequence[Key]
    gradient: torch.Tensor
    rounded: torch.dtype | None

    def own(self) -> list[torch.Tensor | None]:
        return self._run(None, None)

    def exact(self) -> Sequence[torch.Tensor | None]:
        return self._run(self._wide(), None)

    def noisy(self, seed: int) -> Sequence[torch.Tensor | None]:
        return self._run(self._wide(), Noise(seed=seed))

    def _wide(self) -> torch.dtype:
        dtypes = {exact_dtype(self.given.values.recorded[key].dtype) for key in self.keys}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def _run(self, dtype: torch.dtype | None, noise: Noise | None) -> list[torch.Tensor | None]:
        tape = _Tape(self.given.values, self.operands, self.keys, dtype)

        def make(values: Values) -> torch.Tensor:
            with self.given.autocast.again(none=dtype is not None):
                return _Region(self.site, self.body, values, self.operands, dtype, noise).out()

        with fused_noise(noise, self.rounded):
            return tape.through(make, self.gradient)


class _Region:
    """The model's own operations from the operands to the output of a site."""

    def __init__(
        self,
        site: Site,
        body: Body,
        values: Values,
        known: Sequence[Key],
        dtype: torch.dtype | None,
        noise: Noise | None,
    ) -> None:
        self._site, self._body, self._values = site, body, values
        self._dtype, self._noise = dtype, noise
        self._known: dict[fx.Node, Any] = {}
        self._leaves = {key.name: values.recorded[key] for key in known}
        self._inside = _made_of(_differentiable(self._leaves.keys(), body), site, body)

    def out(self) -> torch.Tensor:
        result = None
        for node in outputs.dependents(self._body.mirror, self._site.match):
            result = self._known[node] = self._call(node)
        if not isinstance(result, torch.Tensor):
            raise NoValueError("the output is no tensor")
        return result

    def _call(self, node: fx.Node) -> Any:
        value = self._values.call(node, self._value, dtype=self._dtype)
        if self._noise is None:
            return value
        return self._noise.on_step(value, node.meta.get("val"), map(self._known.get, node.all_input_nodes))

    def _value(self, node: fx.Node) -> Any:
        if node not in self._known:
            self._known[node] = self._found(node)
        return self._known[node]

    def _found(self, node: fx.Node) -> Any:
        name = self._body.names.get(node)
        if name in self._leaves:
            return self._leaves[name]
        if node in self._inside:
            require_computable(node)
            return self._call(node)
        value = self._values.mirror(node)
        # A copy: what is written in place must not reach the values of the next run.
        return _in_dtype(value, self._dtype).clone() if isinstance(value, torch.Tensor) else value


def _in_dtype(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return x if dtype is None or not x.is_floating_point() else x.to(dtype)


def _named(key: Key, site: Site, body: Body) -> str:
    """What a value is to the site, and what the model's own graph calls it."""
    inside = _made_of({key.name}, site, body)
    match = site.match
    roles = {"q": match.q.node, "k": match.k.node, "v": match.v.node}
    found = [role for role, node in roles.items() if node in inside or body.names.get(node) == key.name]
    return f"{' and '.join(found)} ({key.name})" if found else key.name


def _mismatch(site: Site, names: Sequence[str], differences: Sequence[comparing.Difference]) -> VerificationMismatch:
    first, *others = differences
    lowering = site.decision.lowering if site.decision is not None else "the kernel"
    error = VerificationMismatch(
        site=site.module,
        what=f"gradient of {lowering} with respect to {names[first.index]}",
        formula=masks.formula(site),
        index=str(list(first.place)),
        expected=first.expected,
        observed=first.observed,
        allowed=first.allowed,
        differing=first.differing,
    )
    for other in others:
        error.add_note(f"also: the gradient with respect to {names[other.index]}, {list(other.place)}")
    return error
