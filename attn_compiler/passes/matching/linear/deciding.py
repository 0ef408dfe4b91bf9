"""Decision for each call of a proposed function while Dynamo traces it: taken as one node, or traced as usual.

Three questions are decided: the spec of the call, a lowering that would serve it, and the proof of the function. The compilation's report
gives the reason for each call that is not taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_compiler import lowerings
from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.lowerings.graph_ops import linear_call
from attn_compiler.options.options import Options, split_options
from attn_compiler.passes.graph import axes, faults
from attn_compiler.passes.matching import linear_calls
from attn_compiler.passes.matching.linear import proving, running
from attn_compiler.passes.matching.linear.running import Proposed
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Decision, Reason
from attn_compiler.reasons.errors import AttnCompilerError
from attn_compiler.spec.attention import Dim
from attn_compiler.spec.linear import LinearForm, LinearSpec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import substitution
from attn_compiler.torch_private.store import Store

_DTYPES = ("float32", "float64", "bfloat16", "float16")


def decide(
    called: str,
    current: Callable[[], Proposed],
    tensors: Sequence[Tensor],
    roles: tuple[str, ...],
    given: Mapping[str, Any],
) -> tuple[str, Proposed] | None:
    """Return the text of the form that a call is taken with, and the function as it is now; None if it is not taken.

    called, current: the function's name, and the function, read. given: numbers and flags by parameter.
    """
    options = _options()
    if options is None:
        return None
    found: LinearForm | Reason | None = None
    log = faults.Log(strict=options[0].strict)
    # An exception here would make Dynamo end the user's compilation.
    with faults.confined(log, "linear", called) as attempt:
        proposed = current()
        found = _taken(proposed, tensors, roles, given, *options)
    faults.warned([log])
    found = attempt.reason or found
    if isinstance(found, LinearForm):
        linear_call.FUNCTIONS[proposed.name] = proposed.run
        return found.text, proposed
    if found is not None:
        linear_calls.note_refused(called, found)
    return None


def _options() -> tuple[Options, Mapping[str, Any]] | None:
    """Return the options of the current compilation, and Inductor's patches; None if its backend is not ours."""
    backend, settings = substitution.compiling_for()
    if backend is None or not substitution.are_taken_for(backend):
        return None
    own = getattr(backend, "own_options", None)
    if isinstance(own, Options):
        return own, {}
    try:
        return split_options(settings.get("mode"), settings.get("options"))
    except AttnCompilerError:
        # The backend will report the error.
        return None


def _taken(
    proposed: Proposed,
    tensors: Sequence[Tensor],
    roles: tuple[str, ...],
    given: Mapping[str, Any],
    options: Options,
    patches: Mapping[str, Any],
) -> LinearForm | Reason | None:
    """Return the form of a call that is taken, or the reason against it. None: the user asked to leave it alone."""
    spec = spec_of(proposed, tensors, roles, given)
    if isinstance(spec, Reason):
        return spec
    decision = chosen(spec, options)
    if decision.lowering == UNTOUCHED:
        return next((reason for refusal in decision.refusals for reason in refusal.reasons), None)
    store = Store.beside_inductors(patches) if options.cache_rewrites else None
    not_proved = proving.why_not(proposed, spec, store)
    return spec.form if not_proved is None else not_proved


def chosen(spec: LinearSpec, options: Options) -> Decision:
    """Choose the lowering of a call on its device."""
    target = Target.current(spec.device)
    return lowerings.linear_table.decide(
        spec, target, _asked(options), lambda name: lowerings.has_failed(name, spec, target)
    )


def _asked(options: Options) -> tuple[str, ...] | None:
    """Return the lowerings named by the user that may serve a call; None if there are none."""
    return tuple(name for name in options.asked or () if name in (*lowerings.LINEAR_NAMES, UNTOUCHED)) or None


# ---- the spec ----------------------------------------------------------------------------------------------------------


def spec_of(
    proposed: Proposed, tensors: Sequence[Tensor], roles: tuple[str, ...], given: Mapping[str, Any]
) -> LinearSpec | Reason:
    """Return the spec of a call from its operands' fake tensors, or the reason why it is unknown."""
    found = dict(zip(roles, tensors, strict=True))
    wrong = _shapes(proposed, found)
    if wrong is not None:
        return wrong
    channel = proposed.template.recurrence == "delta" and found["g"].dim() == 4
    form = running.form_of(proposed, roles, given, channel=channel)
    v, k = (found["x"], found["B"]) if form.recurrence == "ssd" else (found["v"], found["k"])
    grouped = v.shape[2] != k.shape[2]
    dtypes = running.dtypes_of(proposed, form, {role: x.dtype for role, x in found.items()}, grouped=grouped)
    if isinstance(dtypes, str):
        return _not_proved(proposed, dtypes)
    return call_of(dataclasses.replace(form, out_dtype=dtypes[0], state_dtype=dtypes[1]), tensors)


def call_of(form: LinearForm, tensors: Sequence[Tensor]) -> LinearSpec:
    """Return the spec of a call with these operands, whose shapes are known to fit."""
    found = dict(zip(form.roles, tensors, strict=True))
    v, k = (found["x"], found["B"]) if form.recurrence == "ssd" else (found["v"], found["k"])
    batch, length, num_heads_v, head_dim_v = v.shape
    return LinearSpec(
        form=form,
        batch=_dim(batch),
        length=_dim(length),
        num_heads_k=int(k.shape[2]),
        num_heads_v=int(num_heads_v),
        head_dim_k=int(k.shape[3]),
        head_dim_v=int(head_dim_v),
        dtype=str(v.dtype).removeprefix("torch."),
        device=v.device.type,
        needs_grad=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
    )


def _dim(size: int | torch.SymInt) -> Dim:
    return size if isinstance(size, int) else str(size)


def _not_proved(proposed: Proposed, observed: str) -> Reason:
    return Reason(
        code=Code.LINEAR_NOT_PROVED,
        rule="a function has the operands of a recurrence",
        observed=f"{proposed.called} ({proposed.source}): {observed}",
    )


def _shapes(proposed: Proposed, found: Mapping[str, Tensor]) -> Reason | None:
    """Return why the operands do not have the shapes of the recurrence; None if they do."""
    template = proposed.template
    missing = [role for role in template.operands if role not in found and role not in template.optional]
    if missing:
        return _not_proved(proposed, f"it is not given {', '.join(missing)}")
    several = {x.device for x in found.values()}
    if len(several) > 1 or any(str(x.dtype).removeprefix("torch.") not in _DTYPES for x in found.values()):
        kinds = sorted({f"{x.dtype} on {x.device}" for x in found.values()})
        return Reason(code=Code.DTYPE, rule="all operands are numbers on one device", observed=", ".join(kinds))
    if template.gives == "out, writes" and torch.is_grad_enabled() and any(x.requires_grad for x in found.values()):
        return Reason(
            code=Code.GRADIENT,
            rule="a function that writes its state in place is not differentiated",
            observed=proposed.called,
            remedy="decode under torch.no_grad()",
        )
    v, k = (found["x"], found["B"]) if template.recurrence == "ssd" else (found["v"], found["k"])
    if v.dim() != 4 or k.dim() != 4:
        return _not_proved(proposed, f"v has {v.dim()} axes, and k {k.dim()}")
    sizes = (v.shape[2], v.shape[3], k.shape[2], k.shape[3])
    if not all(isinstance(size, int) for size in sizes):
        return Reason(code=Code.SYMBOLIC, rule="heads and their sizes are known", observed=", ".join(map(str, sizes)))
    return _others(proposed, found, v, k)


def _others(proposed: Proposed, found: Mapping[str, Tensor], v: Tensor, k: Tensor) -> Reason | None:
    """Check the axes of all operands against the sizes read from v and k."""
    batch, length, heads, dim_v = v.shape
    groups, dim_k = k.shape[2:]
    tokens = (batch, length)
    wanted: dict[str, tuple[tuple[Any, ...], ...]] = {
        "q": ((*tokens, groups, dim_k),),
        "k": ((*tokens, groups, dim_k),),
        "g": ((*tokens, heads), (*tokens, heads, dim_k)),
        "beta": ((*tokens, heads),),
        "dt": ((*tokens, heads),),
        "A": ((heads,),),
        "B": ((*tokens, groups, dim_k),),
        "C": ((*tokens, groups, dim_k),),
        "D": ((heads,),),
        "dt_bias": ((heads,),),
        "state": (
            (batch, heads, dim_v, dim_k) if proposed.template.recurrence == "ssd" else (batch, heads, dim_k, dim_v),
        ),
    }
    for role, x in found.items():
        if role in wanted and not any(_same_shape(x.shape, one) for one in wanted[role]):
            return _not_proved(proposed, f"{role} is {tuple(map(str, x.shape))}")
    return _not_proved(proposed, f"{groups} heads of k for {heads} of v") if heads % groups else None


def _same_shape(shape: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(shape) == len(wanted) and all(_same(a, b) for a, b in zip(shape, wanted, strict=True))


def _same(size: int | torch.SymInt, wanted: int | torch.SymInt) -> bool:
    """Compare two sizes. Unequal symbols get a guard that they are equal: the function could not run otherwise."""
    if isinstance(size, torch.SymInt) and isinstance(wanted, torch.SymInt):
        axes.unify(size, wanted)
    return axes.same_size(axes.size_expr(size), axes.size_expr(wanted))
