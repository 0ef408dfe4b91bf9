"""Proof that a function computes the recurrence, by its ops and by runs in float64 at random numbers.

operations.py checks that a test at random points proves the results. branches.py checks the text: no branch behaves otherwise at other
sizes. Outputs, states and all gradients are then compared with the recurrence, at lengths around chunk borders. The real length is run too,
unless a person read the text. One proof serves a text and its sizes, and is kept on disk beside the rewrites.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_compiler import lowerings
from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.options import cache
from attn_compiler.passes.matching.linear import draws, operations, same_steps
from attn_compiler.passes.matching.linear.draws import DrawSizes
from attn_compiler.passes.matching.linear.running import Proposed
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reasons.errors import described
from attn_compiler.spec.linear import LinearForm, LinearSpec
from attn_compiler.torch_private import compat as torch_compat, substitution
from attn_compiler.torch_private.store import Store

#: Digests (source.py) of functions that a person has read, and the releases that have them. A graph of unknown length serves every length,
#: but a test runs at a few only. So such a graph takes only these: their results depend on the length in no way that a test could miss.
READ: dict[str, str] = {
    "898b4196826c994a": "torch_chunk_gated_delta_rule of transformers 5.23 and 5.24: a loop over chunks, and padding with zeros at the end",
    "fd95044c7399bad0": "torch_recurrent_gated_delta_rule of transformers 5.23 and 5.24: a loop over tokens",
    "38e50229a28f9ec8": "chunk_kimi_delta_attention of transformers 5.23 and 5.24: a loop over chunks, and padding with zeros at the end",
    "3a6437d225558956": "recurrent_kimi_delta_attention of transformers 5.23 and 5.24: a loop over tokens",
    "7ad8d0314e997eeb": "mamba2_chunk_scan of transformers 5.18 to 5.24: one product over all pairs of chunks, zeros at the end",
    "adbffa8fc8ef2a4c": "torch_chunk_gated_delta_rule of transformers 5.17 to 5.22: as that of 5.24, without heads that share one of k",
    "09b50fe426748317": "torch_recurrent_gated_delta_rule of transformers 5.17 to 5.22: as that of 5.24, without heads that share one of k",
    "1be20a6ea3891669": "chunk_kimi_delta_attention of transformers 5.17 to 5.22: as that of 5.24, but for a type in `l2norm`",
    "1613ed53b80a5924": "recurrent_kimi_delta_attention of transformers 5.17 to 5.22: as that of 5.24, but for a type in `l2norm`",
    "f46fe5a6256e2c2d": "mamba2_chunk_scan of transformers 5.17: as that of 5.24, with sums of products in the place of einsum",
}

#: allowed float64 difference, relative to numbers of about 1
_NEAR = 1e-9
#: limits of the token-by-token recurrence: tokens, and elements of all states. Larger runs, and those of other sorts of numbers, go by
#: chunks, whose backward takes a tenth of the time.
_ONE_BY_ONE, _FEW = 70, 1 << 12
#: runs up to this many tokens always go token by token
_FEWEST = 2
_SEED = 20261127
#: most tokens of a run: a proof takes seconds, and minutes at 32768 tokens
_LONGEST = 8192
#: stands for the length where nothing depends on it
_ANY = "any"

_PROVED: dict[str, str] = {}


def why_not(proposed: Proposed, spec: LinearSpec, store: Store | None) -> Reason | None:
    """Return why a function is not proved to compute its form at these sizes; None if it is. store: cache of proofs."""
    said = _said(proposed, spec, store)
    if not said:
        return None
    return Reason(
        code=Code.LINEAR_NOT_PROVED,
        rule="the function is proved to compute the recurrence of a lowering",
        observed=f"{proposed.called} ({proposed.source}): {said}",
    )


def _said(proposed: Proposed, spec: LinearSpec, store: Store | None) -> str:
    """Return the reason against a function; "" if it is proved."""
    if proposed.text.why_not is not None:
        return proposed.text.why_not
    if proposed.name.rpartition("#")[2] in READ:
        # One proof serves all lengths.
        spec = dataclasses.replace(spec, length=_ANY)
    elif not isinstance(spec.length, int):
        return "the length is not known, and a test says nothing of lengths that it does not run at (compile with dynamic=False)"
    elif spec.length > _LONGEST:
        return f"{spec.length} tokens take too long to run, and no person read the text: at most {_LONGEST} are run"
    key = _key(spec)
    if key in _PROVED:
        return _PROVED[key]
    kept = None if store is None else store.get(key)
    if not isinstance(kept, dict) or not isinstance(kept.get("said"), str):
        try:
            kept = {"said": _tested(proposed, spec)}
        except Exception as error:
            if torch_compat.starts_over(error):
                raise
            # The error may be temporary, so it is not kept.
            return f"it raised {described(error)}"
        if store is not None:
            store.put(key, kept)
    _PROVED[key] = kept["said"]
    return _PROVED[key]


def _key(spec: LinearSpec) -> str:
    """Digest of everything that a proof depends on."""
    held = dataclasses.replace(spec, dtype="float64", device="cpu", needs_grad=False)
    package = (cache.package_version(), cache.sources_digest())
    parts = (repr(held), *package, str(torch.__version__), sys.version, str(torch.get_default_dtype()))
    return hashlib.sha256(json.dumps(["linear", *parts]).encode()).hexdigest()


def _tested(proposed: Proposed, spec: LinearSpec) -> str:
    with substitution.outside_compilation():
        torch.manual_seed(_SEED)
        is_read = spec.length == _ANY
        steps = None if is_read else same_steps.why_not(proposed, spec)
        return steps or _of_operations(proposed, spec) or _of_numbers(proposed, spec) or ""


def _of_operations(proposed: Proposed, spec: LinearSpec) -> str | None:
    first = next(iter(draws.sizes(spec)))
    length = first.length if spec.form.chunk == 1 else 2 * spec.form.chunk + 3
    given = draws.operands(spec, dataclasses.replace(first, length=length), torch.float32)
    return operations.why_not(proposed.run, [x.detach() for x in given], spec.form)


def _of_numbers(proposed: Proposed, spec: LinearSpec) -> str | None:
    form = dataclasses.replace(spec.form, out_dtype="float64", state_dtype="float64")
    for at in draws.sizes(spec):
        given = draws.operands(spec, at)
        with substitution.Widened():
            theirs = proposed.run(form, given)
        why = _apart(
            theirs, _recurrence(form, given, at), given, is_differentiated=proposed.template.gives != "out, writes"
        )
        if why is not None:
            return f"{why} {at.words}"
    return None


def _recurrence(form: LinearForm, given: Sequence[Tensor], at: DrawSizes) -> tuple[Tensor, Tensor]:
    states = at.batch * at.heads_v * at.dim_k * at.dim_v
    is_short = at.length <= _ONE_BY_ONE and states <= _FEW and at.sort == draws.SORTS[0]
    if is_short or at.length <= _FEWEST:
        return definition(form, given)
    out, last = lowerings.by_chunks(given, form.text)
    return out, last


def _apart(
    theirs: Sequence[Tensor], ours: Sequence[Tensor], given: Sequence[Tensor], *, is_differentiated: bool
) -> str | None:
    """Return the first difference between a function and the recurrence; None if they agree."""
    shapes = [[tuple(x.shape) for x in outs] for outs in (theirs, ours)]
    if shapes[0] != shapes[1]:
        return f"it gives {shapes[0]}, the recurrence {shapes[1]},"
    far = _distance(theirs, ours)
    if not far < _NEAR:
        return f"what it gives is {far:.0e} from the recurrence's"
    if not is_differentiated:
        return None
    weights = [torch.randn_like(x) for x in ours]
    pair = [_gradients(outs, weights, given) for outs in (theirs, ours)]
    if any((x is None) != (y is None) for x, y in zip(*pair, strict=True)):
        return "other operands have a gradient"
    far = _distance(*([x for x in found if x is not None] for found in pair))
    return None if far < _NEAR else f"its gradients are {far:.0e} from the recurrence's"


def _gradients(outs: Sequence[Tensor], weights: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    total = torch.stack([(x.double() * y).sum() for x, y in zip(outs, weights, strict=True)]).sum()
    return torch.autograd.grad(total, given, allow_unused=True)


def _distance(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to 1 plus the largest element; NaN if any element is NaN."""
    with torch.no_grad():
        far = [(x - y).abs().max() / (1 + y.abs().max()) for x, y in zip(ones, others, strict=True)]
        return float(torch.stack(far).max())
