"""What takes no part in an attention, full of NaN and infinities, gets nowhere in lowerings without a kernel of their own: plain math and
the references."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.plain import reference
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from attn_compiler.spec.masks import Alignment
from tests import cases, numerics
from tests.cases import Case, Inputs
from tests.lowerings import poison
from tests.lowerings.emitting import arguments, calls, emit

#: every form that a mask has here, each with keys that nobody sees or with queries that have none
FORMS = {
    case.name: case
    for case in (
        Case(name="top left", causal=Alignment.TOP_LEFT, seqlen_q=21),
        Case(name="bottom right", causal=Alignment.BOTTOM_RIGHT, seqlen_kv=21),
        Case(name="keys", mask="bk"),
        Case(name="2-D", mask="q k"),
        Case(name="by query", mask="bqk"),
        Case(name="by head", mask="bhqk", heads_kv=2),
        Case(name="added", mask="bqk", mask_dtype=torch.float32, heads_kv=2),
        Case(name="added by key", mask="k", mask_dtype=torch.float32),
        Case(name="both", mask="bqk", causal=Alignment.TOP_LEFT, heads_kv=1),
        Case(name="softcap", mask="bqk", softcap=3.0),
        Case(name="sinks", mask="bhqk", sinks=True, heads_kv=2),
    )
}


def allowed(inputs: Inputs) -> Tensor:
    """bool (B, Hq, Sq, Skv)"""
    found = torch.ones(*inputs.q.shape[:3], inputs.k.shape[2], dtype=torch.bool)
    if inputs.mask is not None:
        found = found & (inputs.mask if inputs.mask.dtype == torch.bool else inputs.mask != -torch.inf)
    if inputs.spec.mask.flagged is not None:
        found = found & reference._causal(inputs.spec.mask.flagged, found)
    return found


def build(form: str, dtype: torch.dtype = torch.float32, *, needs_grad: bool = True) -> Inputs:
    """A form's problem with holes: every fifth query has no key, and some keys are seen by nobody."""
    inputs = cases.build(dataclasses.replace(FORMS[form], dtype=dtype), needs_grad=needs_grad)
    if inputs.mask is None:
        return inputs
    mask = inputs.mask
    hidden = False if mask.dtype == torch.bool else -math.inf
    mask[..., 40:44] = hidden
    mask[..., -1:] = hidden
    if mask.shape[-2] > 1:
        mask[..., ::5, :] = hidden
    return inputs


def with_unused(inputs: Inputs, values: tuple[float, ...]) -> Inputs:
    """The values in turn in keys that no query sees, and in queries without keys."""
    whole, wants = allowed(inputs), inputs.q.requires_grad
    unseen = poison.unseen_of(whole, inputs.k.shape[1])
    k, v = (poison.filled(x, unseen, values).requires_grad_(wants) for x in (inputs.k, inputs.v))
    q = poison.filled(inputs.q, ~whole.any(-1), values).requires_grad_(wants)
    return dataclasses.replace(inputs, q=q, k=k, v=v)


@pytest.mark.in_turns
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["math", "reference"])
def test_what_takes_no_part_changes_nothing(name: str, form: str) -> None:
    """Forward and backward; a gradient comes from every row, also from those without keys."""
    inputs = build(form)
    found = []
    for values in ((0.0,), poison.NOT_FINITE):
        given = with_unused(inputs, values)
        module = emit(by_name(name), given)
        found.append(numerics.with_gradients(lambda x, module=module: module(*arguments(x)), given))
    clean, dirty = found
    whole = allowed(inputs)
    assert not whole.any(-1).all() or poison.unseen_of(whole, inputs.k.shape[1]).any()
    for got, right in zip(dirty, clean, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, right)
    if not inputs.spec.score.sinks:
        exact = numerics.with_gradients(numerics_exact, with_unused(inputs, (0.0,)))
        torch.testing.assert_close(dirty[0], exact[0].to(dirty[0].dtype), rtol=1e-4, atol=1e-4)
    without = ~whole.any(-1)
    for tensor in dirty[:2]:
        assert not tensor[without].any()


def numerics_exact(given: Inputs) -> Tensor:
    """In float64, from the definition."""
    q, k, v = (x.double() for x in (given.q, given.k, given.v))
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * given.spec.score.scale
    cap = given.spec.score.softcap
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    if given.mask is not None and given.mask.dtype != torch.bool:
        logits = logits + given.mask.double()
    logits = logits.masked_fill(~allowed(given), -torch.inf)
    return torch.nan_to_num(logits.softmax(-1)) @ v.repeat_interleave(group, 1)


@pytest.mark.parametrize("form", [name for name in FORMS if FORMS[name].mask != "bk"])
def test_the_reference_in_fp8_too(form: str) -> None:
    recipe = Fp8Recipe(scaling=CurrentScaling(granularity="block"))
    inputs = build(form, torch.bfloat16)
    spec = dataclasses.replace(inputs.spec, fp8=recipe)
    inputs = dataclasses.replace(inputs, spec=spec)
    found = []
    for values in ((0.0,), poison.NOT_FINITE):
        given = with_unused(inputs, values)
        module = emit(by_name("reference_fp8"), given)
        found.append(numerics.with_gradients(lambda x, module=module: module(*arguments(x)), given))
    for got, right in zip(found[1], found[0], strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, right)


def test_where_all_takes_part_there_are_no_nodes() -> None:
    for case in (Case(name="none"), Case(name="square", causal=Alignment.TOP_LEFT)):
        module = emit(by_name("math"), cases.build(case))
        assert torch.any not in calls(module)
    for alignment, seqlen_q in ((Alignment.TOP_LEFT, 90), (Alignment.BOTTOM_RIGHT, 30)):
        module = emit(by_name("math"), cases.build(Case(name="causal", causal=alignment, seqlen_q=seqlen_q)))
        assert torch.any not in calls(module)


def test_a_forward_alone_clears_values_alone() -> None:
    """What a key holds is hidden by the mask, and no other row reads a query."""
    module = emit(by_name("math"), build("by query", needs_grad=False))
    cleared = [node for node in module.graph.nodes if node.target is torch.where and node.args[2] == 0.0]
    assert [node.args[1].name for node in cleared] == ["v"]


def test_it_is_compiled() -> None:
    inputs = with_unused(build("by head"), poison.NOT_FINITE)
    module = emit(by_name("math"), inputs)
    compiled = torch.compile(module, backend="inductor", fullgraph=True)
    right = numerics.with_gradients(lambda given: module(*arguments(given)), inputs)
    got = numerics.with_gradients(lambda given: compiled(*arguments(given)), inputs)
    for mine, wanted in zip(got, right, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
