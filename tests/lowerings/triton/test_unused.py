"""What no allowed pair uses may hold anything: keys that no query sees, and rows without a key, with whatever a loss puts on these.

NaN and infinities there change nothing, in any form of mask, forward and backward: results are those of zeros, to the bit where it
follows from the same kernel, and within the project's rule of the definition in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from tests.lowerings import kernel_problems, plan_math
from tests.lowerings.kernel_cases import BOTTOM_RIGHT, CAUSAL, Case
from tests.lowerings.kernel_problems import Problem, build, planned

POISONS = (torch.nan, torch.inf, -torch.inf)
#: what a clean run has instead, and a loss puts on rows without keys: however large
LARGE = 1e30

Named = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A mask. set: puts what is meant into the operands that `build` drew at random."""

    case: Case
    set: Callable[[Named], None] | None = None


def _lengths(named: Named) -> None:
    """Of each batch row: the first keys, for all queries."""
    for row, length in enumerate((0, 33)):
        named["rows"][0, row], named["rows"][1, row] = 0, length


def _gaps(named: Named) -> None:
    """Intervals with keys between them that nobody sees, in the middle of a tile; and queries without any."""
    first, end = named["rows"]
    first[:, :20], end[:, :20] = 3, 17
    first[:, 20:40], end[:, 20:40] = 22, 29
    first[:, 40:50], end[:, 40:50] = 9, 9
    first[:, 50:], end[:, 50:] = 41, 66


def _documents_beside_padding(named: Named) -> None:
    """Padding between documents has a number that no query has, and some queries one that no key has."""
    keys = torch.arange(named["documents_k"].shape[1])
    of_keys = torch.where((keys % 35 < 8) | (keys % 35 > 30), -1, keys // 35)
    of_queries = torch.where(keys % 35 > 25, -2, keys // 35)
    for name, numbers in (("documents_k", of_keys), ("documents_q", of_queries)):
        # Where lengths agree they were one tensor.
        named[name] = numbers[: named[name].shape[1]].to(named[name]).expand_as(named[name]).contiguous()


def _columns_shut(named: Named) -> None:
    """Whole columns of a dense mask, and whole rows."""
    mask = named["mask"]
    mask[..., 5:11] = False
    mask[..., 40:, :] &= torch.arange(mask.shape[3], device=mask.device) > 60
    mask[..., 30:34, :] = False


def _bias_at_shut_pairs(named: Named) -> None:
    """NaN above the diagonal, where nobody looks."""
    bias = named["bias"].data
    above = torch.ones(bias.shape[2:], dtype=torch.bool, device=bias.device).triu(1)
    bias.masked_fill_(above, torch.nan)
    bias[..., :1, 3:5] = torch.inf


def _far_distances(named: Named) -> None:
    """NaN at distances that no allowed pair has: the future's."""
    distances = named["distances"].data
    for copy in range(8):
        distances[:, copy, 70 - copy :] = torch.nan


FORMS = (
    Form(case=Case(name="unused_keys_right", keys="right")),
    Form(case=Case(name="unused_keys_left_causal", keys="left", band=CAUSAL)),
    Form(case=Case(name="unused_keys_none", keys="none")),
    Form(case=Case(name="unused_keys_holes_window", keys="holes", band=Band(left=1, right=0))),
    Form(case=Case(name="unused_keys_unlisted", keys="left", band=CAUSAL, few_pairs=True)),
    Form(case=Case(name="unused_lengths", rows=True), set=_lengths),
    Form(case=Case(name="unused_intervals", rows=True), set=_gaps),
    Form(case=Case(name="unused_intervals_unlisted", rows=True, few_pairs=True), set=_gaps),
    Form(case=Case(name="unused_documents", documents=True, band=CAUSAL), set=_documents_beside_padding),
    Form(case=Case(name="unused_causal_more_keys", band=CAUSAL, seqlen_q=37, seqlen_kv=130)),
    Form(case=Case(name="unused_causal_few_keys", band=CAUSAL, seqlen_q=37, seqlen_kv=60)),
    Form(case=Case(name="unused_from_end_more_queries", band=BOTTOM_RIGHT, seqlen_kv=37)),
    Form(case=Case(name="unused_strict", band=Band(right=-1))),
    Form(case=Case(name="unused_window_of_last", band=Band(left=9, right=0, from_end=True), seqlen_q=37)),
    Form(case=Case(name="unused_left_alone", band=Band(left=-5))),
    Form(case=Case(name="unused_nothing_in_band", band=Band(left=-3, right=1))),
    Form(case=Case(name="unused_mask", mask="bqk"), set=_columns_shut),
    Form(case=Case(name="unused_mask_of_heads", mask="hqk", heads_q=4, heads_kv=2), set=_columns_shut),
    Form(case=Case(name="unused_mask_keys", mask="k", seqlen_q=33)),
    Form(case=Case(name="unused_mask_added", mask="bqk", bias="hqk"), set=_columns_shut),
    Form(case=Case(name="unused_bias", bias="hqk", band=CAUSAL), set=_bias_at_shut_pairs),
    Form(case=Case(name="unused_bias_summed", bias="q", band=Band(right=-1))),
    Form(case=Case(name="unused_bias_softcap", bias="hqk", softcap=2.0, band=CAUSAL), set=_bias_at_shut_pairs),
    Form(case=Case(name="unused_distances", distances=2, band=CAUSAL), set=_far_distances),
    Form(case=Case(name="unused_distances_rows", distances=2, rows=True), set=_gaps),
    Form(case=Case(name="unused_distances_softcap", distances=2, rows=True, softcap=2.0), set=_gaps),
    Form(case=Case(name="unused_softcap", softcap=2.0, documents=True), set=_documents_beside_padding),
    Form(case=Case(name="unused_sinks", sinks=True, rows=True), set=_gaps),
    Form(case=Case(name="unused_sinks_none", sinks=True, keys="none")),
    Form(case=Case(name="unused_dropout", dropout_p=0.3, rows=True), set=_gaps),
    Form(case=Case(name="unused_two_parts", head_dim=80, head_dim_v=48, rows=True), set=_gaps),
    Form(case=Case(name="unused_wide_blocks", rows=True, grad_kv=(64, 32)), set=_gaps),
)


def ids(form: Form) -> str:
    return form.case.name.removeprefix("unused_")


# ---- what nobody uses ---------------------------------------------------------------------------------------------------


def made(form: Form, dtype: torch.dtype) -> Problem:
    """With finite numbers everywhere but in what is added. Lists of tiles are those of the operands as they were set."""
    drawn = build(form.case, dtype=dtype)
    named: Named = {name: x for name, x in drawn.named.items() if not name.startswith("tiles")}
    if form.set is not None:
        form.set(named)
    if form.case.plan.tiles:
        with planned(form.case.plan):
            tiles = kernel_problems.Call.from_text(drawn.text).tiles
        named |= kernel_problems.lists(form.case, named, tiles, kernel_problems.DEVICE)
    k, v = (x.detach().nan_to_num(0.0).requires_grad_() for x in (drawn.k, drawn.v))
    return dataclasses.replace(drawn, k=k, v=v, named=named)


def allowed_of(problem: Problem) -> Tensor:
    """bool (B, Hq, Sq, Skv)."""
    case = problem.case
    pairs = plan_math.allowed(problem.plan, problem.named, case.seqlen_q, case.seqlen_kv, device=problem.q.device)
    return pairs.expand(case.batch, case.heads_q, -1, -1)


def unused_keys(problem: Problem) -> Tensor:
    """bool (B, Hkv, Skv, 1): no query of the group uses the key."""
    case = problem.case
    used = allowed_of(problem).any(2).unflatten(1, (case.heads_kv, -1)).any(2)
    return ~used[..., None]


def rows_without_keys(problem: Problem) -> Tensor:
    """bool (B, Hq, Sq, 1)."""
    return ~allowed_of(problem).any(3)[..., None]


def filled(x: Tensor, where: Tensor, values: tuple[float, ...]) -> Tensor:
    """In x's strides. values: by turns along the sequence."""
    fill = torch.tensor(values, dtype=x.dtype, device=x.device)
    of_positions = fill[torch.arange(x.shape[2], device=x.device) % len(values)][:, None]
    found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return found.copy_(torch.where(where, of_positions, x.detach())).requires_grad_(x.requires_grad)


def poisoned(problem: Problem, values: tuple[float, ...]) -> Problem:
    """With those values in all that nobody uses."""
    keys, rows = unused_keys(problem), rows_without_keys(problem)
    k, v = (filled(x, keys, values) for x in (problem.k, problem.v))
    return dataclasses.replace(problem, q=filled(problem.q, rows, values), k=k, v=v)


def results(problem: Problem, put_on_empty_rows: tuple[float, ...]) -> list[Tensor]:
    """As `kernel_problems.results`, where a loss puts that on rows without any key."""
    out, lse = kernel_problems.outputs(problem)
    grad_out, grad_lse = upstream(problem, out, lse)
    grad_out = filled(grad_out, rows_without_keys(problem), put_on_empty_rows)
    with planned(problem.plan):
        return [out, lse, *torch.autograd.grad([out, lse], problem.leaves, [grad_out, grad_lse])]


def upstream(problem: Problem, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    grad_out, grad_lse = (torch.randn(x.shape, generator=generator).to(x.device) for x in (out, lse))
    grad_lse = torch.where(rows_without_keys(problem)[..., 0], 0.0, grad_lse).to(lse.dtype)
    return grad_out.to(problem.q.dtype).to(out.dtype), grad_lse


def expected(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """From the definition, of zeros in all that nobody uses."""
    plain = poisoned(problem, (0.0,))
    named = {name: x.detach() for name, x in plain.named.items()}
    shut = ~allowed_of(plain)
    if "bias" in named:
        axes = [axis for axis, size in enumerate(named["bias"].shape) if size == 1]
        named["bias"] = named["bias"].masked_fill(shut.all(axes, keepdim=True) if axes else shut, 0.0)
    if "distances" in named:
        named["distances"] = named["distances"].nan_to_num(0.0)
    leaves = [x.detach().to(dtype).requires_grad_() for x in (plain.q, plain.k, plain.v)]
    further = {name: named[name].to(dtype).requires_grad_() for name in plain.plan.differentiable}
    out, lse = kernel_problems.attention(plain, *leaves, {**named, **further})
    grad_out, grad_lse = upstream(plain, out, lse)
    grad_out = grad_out.masked_fill(rows_without_keys(plain), 0.0)
    return [out, lse, *torch.autograd.grad([out, lse], [*leaves, *further.values()], [grad_out, grad_lse])]


# ---- tests --------------------------------------------------------------------------------------------------------------


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("form", FORMS, ids=ids)
def test_nothing_leaks(form: Form) -> None:
    check(form, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=ids)
def test_nothing_leaks_on_a_gpu(form: Form) -> None:
    check(form, torch.bfloat16)


def check(form: Form, dtype: torch.dtype) -> None:
    problem = made(form, dtype)
    rows = rows_without_keys(problem)
    clean = results(poisoned(problem, (LARGE,)), (LARGE,))
    got = results(poisoned(problem, POISONS), POISONS)
    for label, mine, other in zip(problem.labels, got, clean, strict=True):
        assert torch.equal(mine, other), f"{label} changes by what nobody uses"
    out, lse, grad_q = got[:3]
    assert not out.masked_select(rows).any()
    assert not grad_q.masked_select(rows).any()
    if not form.case.sinks:
        assert torch.all(lse[..., None].masked_select(rows) == -torch.inf)
    kernel_problems.assert_close_to(got, expected(problem, torch.float64), expected(problem, dtype), problem)


@pytest.mark.parametrize("form", FORMS, ids=ids)
def test_some_of_it_is_unused(form: Form) -> None:
    problem = made(form, torch.float32)
    added = (x for x in problem.named.values() if x.is_floating_point())
    unused = unused_keys(problem).any() or rows_without_keys(problem).any()
    assert unused or any(x.isnan().any() for x in added)


def test_a_sink_of_minus_infinity_beside_no_key_is_none() -> None:
    problem = made(Form(case=Case(name="unused_no_sink", sinks=True, keys="none")), torch.float32)
    problem.named["sinks"].data.fill_(-torch.inf)
    out, lse, *gradients = results(problem, (1.0,))
    rows = rows_without_keys(problem)
    assert rows.any()
    assert not out.masked_select(rows).any()
    assert torch.all(lse[..., None].masked_select(rows) == -torch.inf)
    assert all(torch.isfinite(x).all() for x in gradients)


def test_a_bias_of_minus_infinity_shuts_a_row_out() -> None:
    """As a mask of numbers does: 0, and no gradient whatever finite loss is put on it."""
    problem = made(Form(case=Case(name="unused_bias_row", bias="hqk", keys="right")), torch.float32)
    problem.named["bias"].data[:, :, 7:9] = -torch.inf
    out, lse = kernel_problems.outputs(problem)
    assert not out[:, :, 7:9].any()
    assert torch.all(lse[:, :, 7:9] == -torch.inf)
    grad_out = torch.ones_like(out)
    with planned(problem.plan):
        gradients = torch.autograd.grad(out, problem.leaves, grad_out, retain_graph=True)
        grad_out[:, :, 7:9] = 1e30
        others = torch.autograd.grad(out, problem.leaves, grad_out)
    assert not gradients[0][:, :, 7:9].any()
    for mine, other in zip(gradients, others, strict=True):
        assert torch.isfinite(mine).all()
        assert torch.equal(mine, other)
