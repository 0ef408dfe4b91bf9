"""The FP8 kernel as it is launched, in Triton's interpreter: parts of a plan, recipes, head dims, layouts; out, lse and all gradients.

On a GPU the same is run in bfloat16, longer, and with the tiles that the lowering chooses.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings.shared.calls.arguments import head_dim_parts
from attn_compiler.lowerings.triton import fp8_launch
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe, StaticScaling
from attn_compiler.spec.target import Target
from tests import numerics
from tests.lowerings import kernel_problems
from tests.lowerings.fp8 import problems
from tests.lowerings.kernel_cases import BY_NAME, Case
from tests.lowerings.triton.test_launch import grown

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter, which has to be chosen before"
)

RECIPES = {
    "tensor": Fp8Recipe(scaling=CurrentScaling(granularity="tensor")),
    "head": Fp8Recipe(),
    "block": Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True),
    "static": Fp8Recipe(scaling=StaticScaling(q=5, k=5, v=5), smooth_k=True),
    "e5m2": Fp8Recipe(forward_format="e5m2"),
    "int8": Fp8Recipe(qk_format="int8", hadamard=True),
    "int8 plain": Fp8Recipe(qk_format="int8", scaling=CurrentScaling(granularity="block")),
}

#: (case, recipe): each part of a plan once, and each recipe several times
PAIRS = (
    ("even", "tensor"),
    ("gqa", "head"),
    ("causal", "int8"),
    ("head_dims_80_48", "int8 plain"),
    ("window_both_sides", "block"),
    ("window_from_end", "static"),
    ("keys_left", "block"),
    ("keys_none", "head"),
    ("documents", "tensor"),
    ("mask_bqk", "static"),
    ("unlisted_rows", "head"),
    ("bias_hqk_causal", "block"),
    ("distances_cross", "head"),
    ("slopes_from_end", "static"),
    ("sinks_keys_none", "block"),
    ("softcap_keys", "block"),
    ("negative_scale", "head"),
    ("dropout_keys_bias", "head"),
    ("everything", "block"),
    ("one_key", "static"),
    ("head_dims_80_48", "head"),
    ("head_dims_192_128", "static"),
    ("head_dim_256", "block"),
    ("layout_joined_mqa", "tensor"),
)


@pytest.mark.in_turns(2)
@interpreted
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_attention_and_all_gradients(pair: tuple[str, str]) -> None:
    case, recipe = pair
    given = problems.build(BY_NAME[case], RECIPES[recipe], dtype=torch.float16)
    problems.assert_within_rule(problems.results(given), given)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_attention_and_all_gradients_on_a_gpu(pair: tuple[str, str]) -> None:
    case, recipe = pair
    target = Target.current("cuda")
    given = problems.build(grown(BY_NAME[case]), RECIPES[recipe], dtype=torch.bfloat16, target=target)
    problems.assert_within_rule(problems.results(given), given)


@interpreted
def test_the_wider_format_is_computed_too() -> None:
    """Its weights have two bits, so the rule of the other does not hold for it."""
    given = problems.build(BY_NAME["even"], RECIPES["e5m2"], dtype=torch.float16)
    assert given.rounded["q8"].dtype == torch.float8_e5m2
    out = problems.results(given)[0]
    exact = kernel_problems.expected(given.problem, torch.float32)[0]
    assert 0.01 < numerics.worst(out, exact) < 0.3


@interpreted
def test_scales_of_several_blocks_are_told_apart() -> None:
    case = dataclasses.replace(BY_NAME["even"], name="blocks", seqlen_q=140, seqlen_kv=140, batch=1)
    problem = problems.build(case, RECIPES["block"], dtype=torch.float16)
    assert problem.rounded["descale_k"].shape == (1, case.heads_kv, 2)
    problems.assert_within_rule(problems.results(problem), problem)
    for name in ("descale_q", "descale_k", "descale_v"):
        other = dict(problem.rounded) | {name: problem.rounded[name].flip(-1) * 1.5}
        with pytest.raises(AssertionError, match="off by"):
            problems.assert_within_rule(problems.results(dataclasses.replace(problem, rounded=other)), problem)


@interpreted
def test_keys_are_visited_from_the_last_one() -> None:
    """A first key with nearly all of the weight: visited first, it would leave nothing of the others' sum."""
    case = Case(name="sink", batch=1, heads_q=1, seqlen_q=64, seqlen_kv=512, head_dim=16, needs_grad=False)
    problem = kernel_problems.build(case, dtype=torch.float16)
    with torch.no_grad():
        problem.q.fill_(1.0)
        # Scores: 13 for the first key, 0 for the others, whose weights are 2**-18.7 of it: below FP8's smallest number at 2**8.
        problem.k.zero_()
        problem.k[:, :, 0] = 13.0 / 4
        problem.v.fill_(1.0)
        problem.v[:, :, 0] = 0.0
    given = problems.rounded_problem(problem, RECIPES["head"])
    out = problems.outputs(given)[0].float()
    exact = 511 / (511 + torch.tensor(13.0).exp())
    torch.testing.assert_close(out, torch.full_like(out, float(exact)), rtol=0.1, atol=0)


def test_head_dims_are_tiles_that_tensor_cores_take() -> None:
    assert [head_dim_parts(d, least=32) for d in (16, 64, 80, 96, 128, 192)] == [
        (32, 0),
        (64, 0),
        (64, 32),
        (64, 32),
        (128, 0),
        (128, 64),
    ]
    assert fp8_launch.parts_of_v(256) == (128, 128)
    assert fp8_launch.parts_of_v(128) == (128, 0)
