"""The passes of wide heads' backward, launched: run in PyTorch on the arguments of their launches (gluon_in_torch.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper import backward_launch, plan, wide_launch
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from tests.lowerings import kernel_problems
from tests.lowerings.hopper import problems
from tests.lowerings.kernel_cases import Case

# A kernel that does not run is no result, though another family serves in its place.
pytestmark = pytest.mark.filterwarnings("error::attn_compiler.AttnCompilerWarning")

_CAUSAL: Any = {"band": Band(right=0)}
_WIDE: Any = {"head_dim": 264, "seqlen_q": 200, "seqlen_kv": 200}


def _launched(case: Case, programs: int = 132) -> dict[str, Any]:
    found, _ = problems.launched(problems.build(case), programs=programs)
    return {name.rpartition(" ")[2]: arguments for name, arguments in found.items() if "wide" in name}


def test_each_gradient_has_a_pass() -> None:
    found = _launched(Case(name="wide passes", **_WIDE, **_CAUSAL))
    assert set(found) == set(wide_launch.PASSES)
    assert {grad: found[grad].numbers["HOW"].BY_KEY for grad in found} == {"q": False, "k": True, "v": True}
    # Blocks of 64 rows and of 128, of two batch rows and two heads.
    assert {grad: found[grad].numbers["blocks"] for grad in found} == {"q": 4, "k": 4, "v": 2}
    assert found["q"].grid == (16, 1, 1)


def test_blocks_that_share_a_list_are_all_there() -> None:
    """A last one may have nothing in it."""
    found = _launched(Case(name="wide lists", keys="left", **_WIDE | {"seqlen_q": 140, "seqlen_kv": 140}, **_CAUSAL))
    assert {grad: found[grad].numbers["blocks"] for grad in found} == {"q": 4, "k": 4, "v": 2}
    assert {grad: found[grad].numbers["HOW"].TOGETHER for grad in found} == {"q": 2, "k": 2, "v": 1}
    assert found["q"].tensors["Lists"] == "tiles"
    assert found["k"].tensors["Lists"] == found["v"].tensors["Lists"] == "tiles_by_key"


def test_without_a_diagonal_one_head_comes_after_the_other() -> None:
    """All blocks are as long then."""
    case = Case(name="wide sections", **_WIDE, **_CAUSAL)
    assert {x.numbers["section"] for x in _launched(case).values()} == {4}
    plain = _launched(dataclasses.replace(case, name="wide plain", band=None))
    assert {x.numbers["section"] for x in plain.values()} == {1}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("keys", [None, "left"])
def test_any_number_of_programs_shares_the_blocks(programs: int, keys: str | None) -> None:
    problem = problems.build(Case(name=f"wide programs {programs} {keys}", keys=keys, **_WIDE, **_CAUSAL))
    kernel_problems.assert_within_rule(problems.results(problem, programs=programs), problem)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("keys", [None, "left"])
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param({"tile": 64, "stages": 5}, id="as they are"),
        pytest.param({"stages": 3, "stages_v": 3}, id="few places"),
        pytest.param({"part": 64, "stages": 9, "stages_v": 4}, id="half as wide"),
    ],
)
def test_any_blocks(blocks: dict[str, int], keys: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = plan.wide_blocks_of

    def other(spec: Any, grad: str) -> plan.WideGradBlocks:
        found = chosen(spec, grad)
        return found if grad == "v" else dataclasses.replace(found, **blocks)

    monkeypatch.setattr(wide_launch, "wide_blocks_of", other)
    problem = problems.build(Case(name=f"wide blocks {blocks} {keys}", keys=keys, **_WIDE, **_CAUSAL))
    kernel_problems.assert_within_rule(problems.results(problem), problem)


def test_the_widest_heads_have_smaller_tiles_up_to_a_diagonal() -> None:
    case = Case(name="wide tiles", **_WIDE | {"head_dim": 512}, **_CAUSAL)
    for band, keys, tile in ((case.band, None, 32), (None, None, 64), (case.band, "left", 64)):
        given = dataclasses.replace(case, name=f"wide tiles {band} {keys}", band=band, keys=keys)
        found = _launched(given)
        assert {grad: found[grad].numbers["HOW"].TILE for grad in found} == {"q": tile, "k": tile, "v": 64}


@pytest.mark.parametrize("group", [1, 4])
def test_every_run_gives_the_same_bits(group: int) -> None:
    """Whichever programs have which blocks: each number has one writer."""
    heads = {"heads_q": 4, "heads_kv": 4 // group}
    problem = problems.build(Case(name=f"wide bits {group}", batch=1, **heads, **_WIDE, **_CAUSAL))
    first = problems.results(problem, programs=4)
    for mine, other in zip(first, problems.results(problem, programs=3), strict=True):
        assert torch.equal(mine, other)


def test_without_lists_and_holes_no_kernel_is_started_for_nan() -> None:
    problem = problems.build(Case(name="wide diagonal", **_WIDE, **_CAUSAL))
    started: list[str] = []

    def record(kernel: Any, same: Any, tensors: Any, arguments: Any, part: str = "") -> None:
        started.append(kernel.fn.__name__)

    with problems.starting(problem, record, programs=3):
        out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:3])
        read = (problem.q, problem.k, problem.v, problems.grad_operands(problem))
        backward_launch.gradients(out, lse, *read, out, lse, problem.text)
    passes = ["attention_grad_wide_sm90", "attention_grad_wide_sm90", "attention_grad_v_wide_sm90"]
    assert started == ["attention_before_backward", *passes, *["attention_sum_groups"] * 2]
