"""The Triton family's kernels as they are launched: every part of a plan, and gradients of what is added to the scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.shared.calls import leaf_calls
from attn_compiler.lowerings.shared.calls.arguments import prepare
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.lowerings.triton import launch
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.lowerings import any_length, emitting, kernel_problems
from tests.lowerings.kernel_cases import ALL, BOTTOM_RIGHT, BY_NAME, Case
from tests.lowerings.kernel_launches import SIZES, launched
from tests.lowerings.kernel_problems import Problem, build, planned, results

# The Triton kernels as they are launched.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the same cases run on the GPU, with larger tiles")


@pytest.mark.in_turns(3)
@interpreted
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_attention_and_all_gradients(case: Case) -> None:
    problem = build(case)
    kernel_problems.assert_within_rule(results(problem), problem)


@interpreted
@pytest.mark.parametrize("name", ["keys_left", "window", "softcap_keys", "sinks", "bias_hqk_causal"])
def test_one_text_serves_every_batch_and_length(name: str) -> None:
    """Forward and all gradients: nothing of a length is in what a graph says."""

    def built(length: int) -> Problem:
        return build(dataclasses.replace(BY_NAME[name], seqlen_q=length, seqlen_kv=length, batch=1 + length % 2))

    for problem in any_length.at_each(built, (70, 33, 64, 5, 141)):
        kernel_problems.assert_within_rule(results(problem), problem)


@interpreted
@pytest.mark.parametrize("name", ["causal", "bias_hqk_causal", "softcap_keys", "sinks", "head_dims_80_48"])
def test_half_precision(name: str) -> None:
    """float16 alone: the interpreter multiplies the bit patterns of bfloat16 (https://github.com/triton-lang/triton/issues/11584)."""
    problem = build(BY_NAME[name], dtype=torch.float16)
    found = results(problem)
    assert {x.dtype for x in found} == {torch.float16, torch.float32}
    kernel_problems.assert_within_rule(found, problem)


def test_without_gradients_there_are_no_lists_by_key() -> None:
    problem = build(dataclasses.replace(BY_NAME["keys_left"], needs_grad=False))
    assert "tiles_by_key" not in problem.plan.operands
    kernel_problems.assert_within_rule(results(problem), problem)


# ---- on a GPU, with the tiles of the table -------------------------------------------------------------------------

_TIMES = 7


def grown(case: Case) -> Case:
    """Long enough for several tiles of the table, and just as odd."""
    longer = {name: getattr(case, name) * _TIMES for name in ("seqlen_q", "seqlen_kv") if getattr(case, name) > 1}
    band = case.band
    if band is not None and band.left is not None:
        band = dataclasses.replace(band, left=band.left * _TIMES)
    return dataclasses.replace(case, band=band, **longer)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in ALL if case.head_dim % 8 == 0], ids=lambda case: case.name)
def test_bfloat16_on_a_gpu(case: Case) -> None:
    check_on_a_gpu(case, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", ["causal", "all_masks", "bias_hqk_causal", "distances", "softcap", "dropout", "everything", "head_dim_256"]
)
def test_other_dtypes_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    check_on_a_gpu(BY_NAME[name], dtype)


def check_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    # What dropout keeps is drawn for all keys at once for the reference: the more, the longer ptxas takes.
    problem = build(case if case.dropout_p else grown(case), dtype=dtype, target=Target.current("cuda"))
    first = results(problem)
    kernel_problems.assert_within_rule(first, problem)
    # The second call takes the arguments of the first, but for the addresses.
    other = build(problem.case, dtype=dtype, target=Target.current("cuda"), seed=3)
    kernel_problems.assert_within_rule(results(other), other)
    assert all(map(torch.equal, first, results(problem)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_named_cases_on_a_gpu(case: cases.Case) -> None:
    check_named(case, "cuda", Target.current("cuda"))


@pytest.mark.parametrize(
    "name",
    ["causal_bottom_right_empty_rows", "head_dim_odd", "additive_empty_rows", "softcap_mask_gqa", "layout_slice"],
)
def test_named_cases_through_their_specs(name: str) -> None:
    case = dataclasses.replace(cases.BY_NAME[name], batch=1)
    check_named(case, "cpu", Target.fake(device="cpu", triton_interpreted=True))


def check_named(case: cases.Case, device: str, target: Target) -> None:
    """A case of tests/cases.py as the lowering decides it, against the math of tests/numerics.py."""
    triton = by_name("triton")
    inputs = cases.build(case, device=device)
    if case.dropout_p or case.layout == "last_stride" or triton.why_not(inputs.spec, target):
        pytest.skip("the lowering refuses it, the layout pass copies it, or no reference draws the same")
    module = emitting.emit(triton, inputs)
    numerics.assert_within_rule(numerics.with_gradients(lambda _: module(*emitting.arguments(inputs)), inputs), inputs)


# ---- rows and tensors without anything -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keys_none", "strict", "causal_from_end_more_queries"])
def test_rows_without_a_key_are_zero_and_leak_nothing(name: str) -> None:
    problem = build(BY_NAME[name])
    out, lse, grad_q, *_ = found = results(problem)
    empty = lse == -torch.inf
    assert 0 < empty.sum() < empty.numel()
    assert not out[empty].any()
    assert not grad_q[empty].any()
    assert all(bool(x.isfinite().all()) for x in (out, *found[2:]))


def test_padded_keys_get_zero_gradients_whatever_they_hold() -> None:
    problem = build(BY_NAME["keys_right"])
    *_, grad_k, grad_v = results(problem)
    unused = ~problem.named["keys"][:, None, :].expand(grad_k.shape[:3])
    assert problem.k[unused].isnan().all()
    assert unused.any()
    assert not grad_k[unused].any()
    assert not grad_v[unused].any()


@pytest.mark.parametrize("sizes", [{"seqlen_q": 0}, {"seqlen_kv": 0}, {"seqlen_q": 0, "seqlen_kv": 0}, {"batch": 0}])
@pytest.mark.parametrize(
    "parts",
    [{}, {"band": BOTTOM_RIGHT, "sinks": True}, {"bias": "hqk"}, {"bias": "hq"}, {"bias": "k"}, {"distances": 2}],
    ids=str,
)
def test_sizes_of_zero(sizes: dict[str, int], parts: dict[str, Any]) -> None:
    problem = build(Case(name="zero", **parts, **sizes))
    out, lse, *gradients = results(problem)
    assert not out.any()
    assert torch.equal(lse, _sinks_alone(problem) if problem.plan.sinks else torch.full_like(lse, -torch.inf))
    for leaf, gradient in zip(problem.leaves, gradients, strict=True):
        assert gradient.shape == leaf.shape
        if leaf is problem.named.get("sinks"):
            continue
        assert not gradient.any()


def _sinks_alone(problem: Problem) -> Tensor:
    """lse of rows in which nothing but the sink is allowed."""
    shape = (problem.case.batch, -1, problem.case.seqlen_q)
    return problem.named["sinks"].detach()[None, :, None].expand(shape)


@pytest.mark.in_turns(2)
@interpreted
@pytest.mark.parametrize("case", [case for case in ALL if case.bias or case.distances], ids=lambda case: case.name)
def test_biases_too_large_to_keep_the_scores_gradients(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_KEPT_BYTES", 0)
    problem = build(case)
    kernel_problems.assert_within_rule(results(problem), problem)


def apart(problem: Problem) -> Problem:
    """With dk and dv in passes of their own."""
    call = Call.from_text(problem.text)
    tiles = dataclasses.replace(call.tiles, grad_kv=dataclasses.replace(call.tiles.grad_kv, apart=True))
    return dataclasses.replace(problem, text=dataclasses.replace(call, tiles=tiles).to_text())


@pytest.mark.in_turns(2)
@interpreted
@pytest.mark.parametrize("name", ["plain", "all_masks", "bias_hqk_causal", "everything", "dropout", "head_dims_80_48"])
def test_gradients_of_keys_and_values_apart(name: str) -> None:
    problem = apart(build(BY_NAME[name]))
    kernel_problems.assert_within_rule(results(problem), problem)


# ---- what is launched ---------------------------------------------------------------------------------------------


def test_without_dropout_nothing_is_drawn() -> None:
    problem = build(BY_NAME["plain"])
    with planned(problem.plan):
        assert prepare(problem.text).constants["DROPOUT"] is False
    assert "seed" not in problem.plan.operands


@pytest.mark.parametrize("name", ["all_masks", "everything"])
def test_every_run_gives_the_same_bits(name: str) -> None:
    problem = build(BY_NAME[name])
    assert all(map(torch.equal, results(problem), results(problem)))


def test_grids_cover_every_block_head_and_batch_row_once() -> None:
    problem = build(Case(name="grids", **SIZES, grad_kv=(32, 64), distances=8))  # type: ignore[arg-type]
    grids = {name: asked.grid for name, asked in launched(problem).items()}
    assert grids == {
        "attention_forward": (5, 8, 3),
        "attention_row_stats": (3, 8, 3),
        # of each of two spans of 128 queries: four blocks of three batch rows, and diagonals to 17 blocks of keys
        "attention_grad_q_kept": (2 * (4 * 3 + 17 + 4 - 1), 8, 1),
        "attention_grad_kv": (9, 2, 3),
        # of 157 + 513 - 1 distances, in rows of whole vectors
        "attention_sum_diagonals": (6, 8, 1),
    }


@pytest.mark.parametrize(
    ("case", "readers"),
    [
        (Case(name="kept_bias", bias="hqk"), {"attention_grad_q_kept"}),
        (Case(name="kept_bias_of_rows", bias="hq"), {"attention_grad_q_kept", "attention_grad_bias"}),
        (Case(name="kept_distances", distances=2), {"attention_grad_q_kept"}),
        (Case(name="kept_both", bias="hqk", distances=2), {"attention_grad_q_kept", "attention_grad_distances"}),
        (Case(name="kept_softcap", bias="hqk", softcap=5.0), set()),
        (Case(name="kept_none"), set()),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_scores_gradients_are_kept_where_a_bias_is_learned(case: Case, readers: set[str]) -> None:
    found = {name: asked for name, asked in launched(build(case)).items() if asked.tensors.get("Scores") is not None}
    assert set(found) == (readers | {"attention_grad_kv"} if readers else set())
    assert all(asked.numbers["pitch"] % 16 == 0 for asked in found.values())


def test_what_keeps_the_scores_gradients_runs_before_those_that_read_them() -> None:
    found = launched(build(BY_NAME["bias_hqk_causal"]))
    order = ["attention_row_stats", "attention_grad_kv", "attention_grad_q_kept"]
    assert list(found) == ["attention_forward", *order]


def test_dq_makes_the_row_stats_where_it_comes_first() -> None:
    found = launched(build(BY_NAME["causal"]))
    assert list(found) == ["attention_forward", "attention_grad_q", "attention_grad_kv"]


def test_tiles_are_those_of_the_call() -> None:
    problem = build(Case(name="tiles", grad_kv=(64, 32)))
    found = launched(problem)
    tiles = Call.from_text(problem.text).tiles
    for name, tile in (("forward", tiles.forward), ("grad_q", tiles.grad_q), ("grad_kv", tiles.grad_kv)):
        asked = found[f"attention_{name}"]
        assert asked.tile == tile
        assert (asked.numbers["BLOCK_M"], asked.numbers["BLOCK_N"]) == (tile.queries, tile.keys)


@pytest.mark.parametrize(
    ("layout", "head_dim", "vector"),
    [
        ("bshd", 16, 4),
        ("bhsd", 16, 4),
        ("expanded_heads", 16, 4),
        ("slice", 16, 1),
        ("bshd", 5, 1),
        ("sb(h+2hg)d", 16, 4),
    ],
)
def test_whole_vectors_are_loaded_only_where_all_heads_and_positions_are_aligned(
    layout: str, head_dim: int, vector: int
) -> None:
    found = launched(build(Case(name="align", layout=layout, head_dim=head_dim)))
    assert {found[f"attention_{kernel}"].numbers["ALIGN"] for kernel in ("forward", "grad_q", "grad_kv")} == {vector}


def test_an_upstream_gradient_may_lie_otherwise() -> None:
    """A sum expands one number to the gradient of everything."""
    problem = build(BY_NAME["causal"])
    cast = build(BY_NAME["causal"])
    with planned(problem.plan):
        out, _ = kernel_problems.outputs(problem)
        found = torch.autograd.grad(out.sum(), problem.leaves)
    exact, _ = kernel_problems.attention(cast, cast.q, cast.k, cast.v, cast.named)
    for ours, theirs in zip(found, torch.autograd.grad(exact.sum(), cast.leaves), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


# ---- places in compiled code ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "keys_right", "all_masks", "bias_hqk_causal", "distances", "sinks"])
def test_places_give_what_the_bodies_give_on_a_gpu(name: str) -> None:
    problem = build(grown(BY_NAME[name]), dtype=torch.bfloat16)
    given = (problem.q.detach(), problem.k.detach(), problem.v.detach())
    operands = [x.detach() for x in problem.operands]
    forward, backward = launch.ForwardSite(), launch.BackwardSite()
    between = torch.empty(given[1].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:]
    between = between.view(given[1].transpose(1, 2).shape).transpose(1, 2).copy_(given[1])
    for k in (given[1], given[1].clone(memory_format=torch.preserve_format), between, given[1]):
        _assert_equal_at(forward, backward, problem, (given[0], k, given[2]), operands)


def _assert_equal_at(
    forward: leaf_calls.ForwardSite,
    backward: leaf_calls.BackwardSite,
    problem: Problem,
    qkv: tuple[Tensor, Tensor, Tensor],
    operands: list[Tensor],
) -> None:
    q, k, v = qkv
    with planned(problem.plan):
        out, lse = forward(q, k, v, operands, problem.text)
        expected = launch.forward(q, k, v, operands, problem.text)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        noise = torch.randn_like(out), torch.zeros_like(lse)
        *grads, further = backward(*noise, q, k, v, operands, out, lse, problem.text)
        *wanted, others = launch.gradients(*noise, q, k, v, operands, out, lse, problem.text)
        for ours, theirs in zip([*grads, *further], [*wanted, *others], strict=True):
            assert torch.equal(ours, theirs)


# The launches for gradients of what is added to the scores.
@pytest.mark.parametrize(("axes", "grid"), [("hq", (5, 8, 1)), ("bk", (17, 1, 3)), ("", (1, 1, 1))])
def test_the_gradient_of_a_bias_has_a_program_for_each_of_its_own_tiles(axes: str, grid: tuple[int, int, int]) -> None:
    problem = build(Case(name="grids_bias", **SIZES, bias=axes))  # type: ignore[arg-type]
    found = launched(problem)
    assert found["attention_grad_bias"].grid == grid
    assert found["attention_grad_q_kept"].grid == (5 * 8 * 3, 1, 1)


@pytest.mark.parametrize(
    ("axes", "grid"),
    [
        # two spans of 128 queries, which are 4 blocks: programs of dq, and of the bias, for each head and batch row
        ("bhqk", (2 * (4 + 4 * 17), 8, 3)),
        ("hqk", (2 * (4 * 3 + 4 * 17), 8, 1)),
        ("bqk", (2 * (4 * 8 + 4 * 17), 1, 3)),
        ("qk", (2 * (4 * 24 + 4 * 17), 1, 1)),
    ],
)
def test_a_bias_of_both_axes_gets_its_gradient_in_the_launch_of_dq(axes: str, grid: tuple[int, int, int]) -> None:
    problem = build(Case(name="grids_bias", **SIZES, bias=axes))  # type: ignore[arg-type]
    found = launched(problem)
    assert found["attention_grad_q_kept"].grid == grid
    assert "attention_grad_bias" not in found


@pytest.mark.parametrize("axes", ["bhqk", "hqk"])
def test_an_empty_batch_starts_nothing(axes: str) -> None:
    problem = build(Case(name="empty", **(SIZES | {"batch": 0}), bias=axes))  # type: ignore[arg-type]
    assert 0 in launched(problem)["attention_grad_kv"].grid
    dq = launched(problem)["attention_grad_q_kept"]
    # A bias that the batch shares still gets its zeros.
    assert (0 in dq.grid) == (axes == "bhqk")


@pytest.mark.parametrize("given", [{"bias": "hqk"}, {"distances": 1}], ids=str)
def test_a_span_holds_whole_tiles(given: dict[str, object]) -> None:
    problem = build(Case(name="wide", **SIZES, **given))  # type: ignore[arg-type]
    call = Call.from_text(problem.text)
    wide = dataclasses.replace(call.tiles, grad_q=dataclasses.replace(call.tiles.grad_q, queries=256))
    problem = dataclasses.replace(problem, text=dataclasses.replace(call, tiles=wide).to_text())
    numbers = launched(problem)["attention_grad_q_kept"].numbers
    assert numbers["SPAN"] % numbers["BLOCK_M"] == numbers["SPAN"] % numbers["SIZE"] == 0
