"""Elements that lie more than 2^31 elements from the first: every kernel finds them, whichever axis is that long.

Memory that nothing was written to costs nothing on a CPU: an operand of a few numbers spans gigabytes of addresses. On a GPU it is 3 GB
of half precision, so only some cases run there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from attn_compiler.lowerings.base import LayoutDemand
from attn_compiler.lowerings.decode import plan
from attn_compiler.lowerings.decode.lowering import Decode
from attn_compiler.lowerings.shared.calls import arguments
from attn_compiler.lowerings.shared.launching import launch as launching
from attn_compiler.lowerings.shared.parts.kernel_plan import FARTHEST, MOST_BLOCKS, MOST_POSITIONS, Band, Plan
from attn_compiler.lowerings.triton.lowering import TritonAttention
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import DenseBias, ScoreSpec
from attn_compiler.spec.target import Target
from tests.lowerings import kernel_problems
from tests.lowerings.decode import problems
from tests.lowerings.kernel_cases import BOTTOM_RIGHT, Case

LIMIT = 2**31
AXES = "bhqk"

_SIZES: Any = {"heads_q": 2, "heads_kv": 2, "seqlen_q": 40, "seqlen_kv": 70, "band": BOTTOM_RIGHT}
PLAIN = Case(name="far", **_SIZES)
MASKED = Case(name="far_mask", mask="bhqk", **_SIZES)
ADDED = Case(name="far_bias", bias="bhqk", **_SIZES)
#: its gradient's products are taken again, and one that is summed
ADDED_AGAIN = Case(name="far_bias_again", bias="bhqk", softcap=3.0, **_SIZES)
ADDED_SUMMED = Case(name="far_bias_summed", bias="bhq", **_SIZES)
BY_DISTANCE = Case(name="far_distances", distances=2, **_SIZES)

FAR = (
    *((PLAIN, name, axis) for name in ("q", "k", "v", "grad_out") for axis in range(3)),
    *(
        (case, name, axis)
        for case, name in ((MASKED, "mask"), (ADDED, "bias"), (ADDED_AGAIN, "bias"))
        for axis in range(4)
    ),
    *((ADDED_SUMMED, "bias", axis) for axis in range(3)),
)


def far(x: Tensor, axis: int, *, step: int | None = None) -> Tensor:
    """The same numbers, of which the last along an axis lies beyond the limit, or a step from the one before; the others are packed."""
    sizes = list(x.shape)
    rest, packed = 1, [0] * x.dim()
    for dim in reversed(range(x.dim())):
        if dim != axis:
            packed[dim] = rest
            rest *= sizes[dim]
    # Whole vectors, so that nothing is copied for its alignment.
    packed[axis] = step or -(-LIMIT // (sizes[axis] - 1) // 64) * 64
    room = torch.empty((sizes[axis] - 1) * packed[axis] + rest, dtype=x.dtype, device=x.device)
    return room.as_strided(sizes, packed).copy_(x.detach()).requires_grad_(x.requires_grad)


def results(problem: kernel_problems.Problem, grad_out: Tensor) -> list[Tensor]:
    out, lse = kernel_problems.outputs(problem)
    with kernel_problems.planned(problem.plan):
        return [out, lse, *torch.autograd.grad(out, problem.leaves, grad_out)]


def upstream(problem: kernel_problems.Problem) -> Tensor:
    case = problem.case
    shape = (case.batch, case.heads_q, case.seqlen_q, case.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(problem.q)


@functools.cache
def near_results(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Of the problem of the case as it is built. They are the same each time."""
    problem = kernel_problems.build(case, dtype=dtype)
    return results(problem, upstream(problem))


def check(case: Case, name: str, axis: int, dtype: torch.dtype) -> None:
    """On a GPU other strides may compile another kernel, which rounds in another order."""
    problem = kernel_problems.build(case, dtype=dtype)
    grad_out = upstream(problem)
    near = near_results(case, dtype)
    match name:
        case "grad_out":
            grad_out = far(grad_out, axis)
        case "q" | "k" | "v":
            problem = dataclasses.replace(problem, **{name: far(getattr(problem, name), axis)})
        case _:
            problem = dataclasses.replace(problem, named=problem.named | {name: far(problem.named[name], axis)})
    for label, mine, right in zip(problem.labels, results(problem, grad_out), near, strict=True):
        if problem.q.is_cuda:
            torch.testing.assert_close(mine, right, msg=lambda text, label=label: f"{label}: {text}")
        else:
            assert torch.equal(mine, right), label


@pytest.mark.in_turns(3)
@pytest.mark.skipif(torch.cuda.is_available(), reason="some of them run on the GPU")
@pytest.mark.parametrize(("case", "name", "axis"), FAR, ids=lambda x: x.name if isinstance(x, Case) else str(x))
def test_an_axis_beyond_32_bits(case: Case, name: str, axis: int) -> None:
    check(case, name, axis, torch.float32)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(
    ("case", "name", "axis"),
    [
        (PLAIN, "q", 2),
        (PLAIN, "k", 1),
        (PLAIN, "v", 2),
        (PLAIN, "grad_out", 2),
        (MASKED, "mask", 3),
        (ADDED, "bias", 3),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else str(x),
)
def test_an_axis_beyond_32_bits_on_a_gpu(case: Case, name: str, axis: int) -> None:
    check(case, name, axis, torch.bfloat16)


def test_numbers_by_distance_of_far_heads() -> None:
    problem = kernel_problems.build(BY_DISTANCE)
    grad_out = upstream(problem)
    near = results(problem, grad_out)
    moved = dataclasses.replace(problem, named=problem.named | {"distances": far(problem.named["distances"], 0)})
    for label, mine, right in zip(problem.labels, results(moved, grad_out), near, strict=True):
        assert torch.equal(mine, right), label


@pytest.mark.parametrize("step", [FARTHEST, FARTHEST + 1])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_tile_beyond_32_bits(name: str, step: int) -> None:
    """With the widest steps that are read as they are, and with those that a copy is made for."""
    problem = kernel_problems.build(PLAIN)
    near = kernel_problems.outputs(problem)
    moved = dataclasses.replace(problem, **{name: far(getattr(problem, name), 2, step=step)})
    assert arguments.is_far(getattr(moved, name)) == (step > FARTHEST)
    for mine, right in zip(kernel_problems.outputs(moved), near, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("right", [2**30, 2**31 - 1, 2**31, 2**40])
def test_a_band_wider_than_any_sequence(right: int) -> None:
    """A position and its bound are added up."""
    band = Band(left=right, right=right)
    wide, none = (kernel_problems.build(Case(name=f"far_band_{right}_{b is None}", band=b)) for b in (band, None))
    for mine, expected in zip(kernel_problems.results(wide), kernel_problems.results(none), strict=True):
        assert torch.equal(mine, expected)


# ---- decode -------------------------------------------------------------------------------------------------------------

_CACHE: Any = {"bounds": ((0, 150), (3, 99)), "seqlen_q": 2}
DECODE = (
    *((problems.Case(name="far", **_CACHE), name, axis) for name in ("q", "k", "v") for axis in range(3)),
    *((problems.Case(name="far_mask", mask="bhqk", **_CACHE), "mask", axis) for axis in range(4)),
    *((problems.Case(name="far_bias", bias="bhqk", **_CACHE), "bias", axis) for axis in range(4)),
    (problems.Case(name="far_distances", distances=4, **_CACHE), "distances", 0),
)


@pytest.mark.in_turns(3)
@pytest.mark.skipif(torch.cuda.is_available(), reason="one of them runs on the GPU")
@pytest.mark.parametrize(("case", "name", "axis"), DECODE, ids=lambda x: str(getattr(x, "name", x)))
def test_a_cache_beyond_32_bits(case: problems.Case, name: str, axis: int) -> None:
    check_decode(case, name, axis, torch.float32)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_cache_beyond_32_bits_on_a_gpu() -> None:
    check_decode(DECODE[0][0], "k", 2, torch.bfloat16)


@functools.cache
def near_decode(case: problems.Case, dtype: torch.dtype) -> list[Tensor]:
    return list(problems.results(problems.build(case, dtype=dtype)))


def check_decode(case: problems.Case, name: str, axis: int, dtype: torch.dtype) -> None:
    problem = problems.build(case, dtype=dtype)
    if name in ("q", "k", "v"):
        moved = dataclasses.replace(problem, **{name: far(getattr(problem, name), axis)})
    else:
        moved = dataclasses.replace(problem, named=problem.named | {name: far(problem.named[name], axis)})
    for mine, right in zip(problems.results(moved), near_decode(case, dtype), strict=True):
        assert torch.equal(mine, right)


# ---- refusals -----------------------------------------------------------------------------------------------------------


def spec_of(
    *, batch: int = 1, heads: int = 2, seqlen: int = 64, queries: int | None = None, **further: Any
) -> AttentionSpec:
    def tensor(length: int) -> TensorSpec:
        shape = (batch, heads, length, 64)
        return TensorSpec(shape=shape, strides=(heads * length * 64, length * 64, 64, 1), dtype="bfloat16")

    q, k = tensor(queries or seqlen), tensor(seqlen)
    score = further.pop("score", ScoreSpec(scale=0.125))
    return AttentionSpec(q=q, k=k, v=k, mask=MaskSpec(), score=score, device="cuda", out_dtype="bfloat16", **further)


def rules(spec: AttentionSpec, lowering: Any = None) -> list[str]:
    return [reason.rule for reason in (lowering or TritonAttention()).why_not(spec, Target.fake(sm=90))]


def test_what_is_counted_in_32_bits_is_refused_beyond() -> None:
    assert not rules(spec_of(seqlen=MOST_POSITIONS))
    assert rules(spec_of(seqlen=MOST_POSITIONS + 1)) == [f"there are at most {MOST_POSITIONS} positions"]
    assert not rules(spec_of(batch=32768, heads=65535))
    assert rules(spec_of(batch=32769, heads=65535)) == [f"batch · num_heads_q is at most {MOST_BLOCKS}"]


def test_a_learned_number_of_all_scores_is_refused_where_no_loop_counts_them() -> None:
    def learned(shape: tuple[int, ...], seqlen: int) -> AttentionSpec:
        bias = DenseBias(shape=shape, dtype="bfloat16", requires_grad=True)
        return spec_of(seqlen=seqlen, heads=8, needs_grad=True, score=ScoreSpec(scale=0.125, changes=(bias,)))

    assert not rules(learned((1, 1, 1, 1), 2**18))
    assert len(rules(learned((1, 1, 1, 1), 2**20))) == 1
    assert not rules(learned((1, 8, 1, 2**20), 2**20))


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(65535, 65535), (65534, 32767), (65535, 21845), (65535, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_heads_that_fit_a_grid_do_with_their_blocks_of_rows(heads_q: int, heads_kv: int, dtype: str) -> None:
    """Of the decode kernel, whose grid has both along one axis: so there is no refusal of its own."""
    q, k = (spec_of(heads=heads, queries=16).q for heads in (heads_q, heads_kv))
    q, k = (dataclasses.replace(x, dtype=dtype) for x in (q, k))
    spec = dataclasses.replace(spec_of(), q=q, k=k, v=k)
    _, blocks = plan.rows_of(spec)
    launching.check_grid((1, heads_kv * blocks, 1))


def test_lengths_and_grids_that_are_only_known_when_they_run_are_refused_by_name() -> None:
    q = torch.empty(1, 1, 1, 16, device="meta")
    with pytest.raises(ValueError, match=f"at most {MOST_POSITIONS} positions"):
        arguments.check_lengths(q, torch.empty(1, 1, MOST_POSITIONS + 1, 16, device="meta"))
    with pytest.raises(ValueError, match="split the batch"):
        launching.check_grid((1, 1, 65536))
    launching.check_grid((MOST_BLOCKS, 65535, 65535))


def test_the_layout_pass_copies_what_a_kernel_would_copy() -> None:
    demand = TritonAttention().demand(spec_of())
    near, beyond = (
        TensorSpec(shape=(1, 2, 64, 64), strides=(64, 64, step, 1), dtype="bfloat16") for step in (2**22, 2**23)
    )
    assert demand.broken_by(near) is None
    assert "apart" in str(demand.broken_by(beyond))
    assert demand.broken_by(dataclasses.replace(beyond, shape=(1, 2, 1, 64))) is None
    assert LayoutDemand().broken_by(beyond) is None
    assert Decode().demand(spec_of()).broken_by(beyond) is None


def test_every_plan_has_a_case() -> None:
    """Operands of one number each query, key or head lie within what is counted."""
    reads = {"rows", "keys", "documents_q", "documents_k", "slopes", "sinks", "seed", "tiles", "tiles_by_key"}
    everything = Plan(
        **{field.name: True for field in dataclasses.fields(Plan) if field.name not in ("band", "few_pairs")}
    )
    assert set(everything.operands) == reads | {"mask", "bias", "distances"}
