"""What the kernels of gradients are launched with, for whichever family asks; their numbers are triton/test_launch.py's."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.lowerings.shared.calls import gradient_launch
from attn_compiler.lowerings.shared.calls.arguments import STATS_BLOCK
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_launches import launched
from tests.lowerings.kernel_problems import build, results


@pytest.mark.parametrize("tiles", [(32, 128), (128, 32)], ids=["dq_small", "dq_large"])
def test_every_block_of_every_pass_finds_row_stats(tiles: tuple[int, int]) -> None:
    problem = build(Case(name="row_stats", seqlen_q=130, grad_kv=(tiles[1], 32)))
    call = Call.from_text(problem.text)
    small = dataclasses.replace(call.tiles.grad_q, queries=tiles[0])
    call = dataclasses.replace(call, tiles=dataclasses.replace(call.tiles, grad_q=small))
    problem = dataclasses.replace(problem, text=call.to_text())
    found = launched(problem)
    for name in ("attention_grad_q", "attention_grad_kv"):
        assert found[name].numbers["stats_rows"] == 256
    assert found["attention_grad_q"].numbers["ROUND"] == 128
    kernel_problems.assert_within_rule(results(problem), problem)


@pytest.mark.parametrize(
    ("axes", "batch", "head_dim", "expected"),
    [("hqk", 3, 64, True), ("hqk", 3, 80, False), ("hqk", 1, 64, False), ("bhqk", 3, 64, False), ("qk", 3, 64, False)],
)
def test_batch_rows_that_share_a_bias_follow_each_other(axes: str, batch: int, head_dim: int, expected: bool) -> None:
    case = Case(name="heads_last", batch=batch, heads_q=4, heads_kv=2, head_dim=head_dim, bias=axes, bias_grad=False)
    found = launched(build(case))
    for name, heads in (("attention_forward", 4), ("attention_grad_q", 4), ("attention_grad_kv", 2)):
        assert found[name].numbers["HEADS_LAST"] == expected
        assert found[name].grid[1:] == ((batch, heads) if expected else (heads, batch))


@pytest.mark.parametrize(("last", "grid"), [(False, (5, 8, 3)), (True, (5, 3, 8))])
def test_the_last_axis_of_a_grid_is_the_slowest(last: bool, grid: tuple[int, int, int]) -> None:
    assert gradient_launch.grid(5, 8, 3, last) == grid


def test_each_of_the_two_gradients_of_a_pass_over_keys_can_be_left_out() -> None:
    problem = build(Case(name="apart", grad_kv=(32, 32)))
    call = Call.from_text(problem.text)
    apart = dataclasses.replace(call.tiles, grad_kv=dataclasses.replace(call.tiles.grad_kv, apart=True))
    text = dataclasses.replace(call, tiles=apart).to_text()
    both, last = (launched(each)["attention_grad_kv"] for each in (problem, dataclasses.replace(problem, text=text)))
    assert (both.numbers["FOR_K"], both.numbers["FOR_V"]) == (True, True)
    # Of the two launches the second one, which is for v.
    assert (last.numbers["FOR_K"], last.numbers["FOR_V"]) == (False, True)


def test_a_program_for_each_head_sums_the_gradient_of_its_sink() -> None:
    found = launched(build(Case(name="sinks", sinks=True, batch=3, heads_q=4, heads_kv=2, seqlen_q=130)))
    asked = found["attention_grad_sinks"]
    assert asked.grid == (4, 1, 1)
    numbers = {name: asked.numbers[name] for name in ("batch_size", "heads_q", "stats_rows", "BLOCK")}
    assert numbers == {"batch_size": 3, "heads_q": 4, "stats_rows": 192, "BLOCK": STATS_BLOCK}
