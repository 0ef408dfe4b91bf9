"""The FP8 kernel for Hopper as it is launched: parts of a plan, recipes, head dims, layouts; out, lse and, on a GPU, all gradients.

Without a GPU its Python is run in PyTorch (kernels/gluon_in_torch.py).
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import attn_compiler
from attn_compiler.lowerings.fp8 import quantise
from attn_compiler.lowerings.hopper import fp8 as hopper_fp8, fp8_launch
from attn_compiler.lowerings.hopper.kernels import forward_fp8_sm90
from attn_compiler.lowerings.shared.launching import persistent
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Call
from attn_compiler.spec.fp8_recipe import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.spec.target import Target
from tests import numerics
from tests.lowerings import kernel_problems
from tests.lowerings.fp8 import problems
from tests.lowerings.kernel_cases import BY_NAME, Case
from tests.lowerings.shared.kernels import gluon_in_torch
from tests.lowerings.triton.test_launch import grown

RECIPES = {
    "tensor": Fp8Recipe(scaling=CurrentScaling(granularity="tensor")),
    "head": Fp8Recipe(),
    "block": Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True),
    "static": Fp8Recipe(scaling=StaticScaling(q=5, k=5, v=5), smooth_k=True),
    "int8": Fp8Recipe(qk_format="int8", hadamard=True),
}
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")


#: further bands. Names of heads of other sizes end with them.
BANDS = (
    Case(
        name="window_sinks_softcap_64",
        band=Band(left=15, right=0),
        sinks=True,
        softcap=2.0,
        head_dim=64,
        heads_q=4,
        heads_kv=2,
    ),
    Case(name="window_128", band=Band(left=50, right=0), seqlen_q=130, seqlen_kv=130, head_dim=128),
    Case(name="window_both_sides_128", band=Band(left=33, right=300), seqlen_q=130, seqlen_kv=130, head_dim=128),
    Case(name="window_of_one_key", band=Band(left=0, right=0)),
    Case(name="window_of_all", band=Band(left=500, right=5000)),
    Case(name="window_more_keys", band=Band(left=20, right=0), seqlen_q=37, seqlen_kv=130),
    Case(name="window_more_queries", band=Band(left=20, right=3), seqlen_q=130, seqlen_kv=37, head_dim=64),
    Case(name="window_beyond", band=Band(left=-10, right=150), seqlen_q=130),
    Case(name="window_from_end_more_queries", band=Band(left=9, right=5, from_end=True), seqlen_kv=37),
    Case(name="window_sinks_more_queries", band=Band(left=9, right=0), sinks=True, seqlen_kv=37),
)
CASES = BY_NAME | {case.name: case for case in BANDS}
PAIRS = (
    ("even", "tensor"),
    ("gqa", "head"),
    ("causal", "int8"),
    ("softcap", "int8"),
    ("causal", "block"),
    ("plain", "block"),
    ("causal_more_keys", "static"),
    ("softcap", "block"),
    ("sinks", "head"),
    ("head_dims_80_48", "head"),
    ("one_key", "static"),
    ("layout_joined_mqa", "tensor"),
    ("window", "head"),
    ("window_both_sides", "block"),
    ("window_from_end", "static"),
)

#: forward only on a GPU, where each takes a while to compile
BAND_PAIRS = (
    ("window_left_alone", "tensor"),
    ("strict", "head"),
    ("offset", "block"),
    ("causal_from_end_more_queries", "head"),
    ("window_sinks_softcap_64", "block"),
    ("window_128", "block"),
    ("window_both_sides_128", "int8"),
    ("window_of_one_key", "block"),
    ("window_of_all", "block"),
    ("window_more_keys", "int8"),
    ("window_more_queries", "block"),
    ("window_beyond", "head"),
    ("window_from_end_more_queries", "static"),
    ("window_sinks_more_queries", "block"),
)


@pytest.fixture(scope="module")
def hopper() -> Target:
    target = Target.current("cuda")
    reasons = hopper_fp8.HopperFp8().unavailable(target)
    if reasons:
        pytest.skip(str(reasons[0]))
    return target


#: further ones without a GPU
CPU_PAIRS = (
    ("causal_from_end", "block"),
    ("causal_more_queries", "head"),
    ("causal_more_keys", "int8"),
    ("window_left_alone", "block"),
    ("window_wide", "block"),
    ("window_more_queries", "int8"),
)


#: bands of batch rows that have numbers of keys of their own: of 490 keys none, some of one tile, and all
LENGTHS = (0, 65, 300, 490)
OF_LENGTHS: dict[str, Band | None] = {
    "full": None,
    "causal": Band(right=0),
    "window": Band(left=99, right=0),
    "both_sides": Band(left=200, right=30),
}


def of_lengths(name: str, device: str) -> kernel_problems.Problem:
    """float16, forward only."""
    sizes: dict[str, Any] = {"batch": len(LENGTHS), "seqlen_q": 490, "seqlen_kv": 490, "head_dim": 64, "heads_q": 4}
    case = Case(name=f"lengths_{name}", rows=True, band=OF_LENGTHS[name], **sizes)
    problem = kernel_problems.build(case, dtype=torch.float16, device=device)
    rows = problem.named["rows"]
    rows[0], rows[1] = 0, torch.tensor(LENGTHS, device=device, dtype=torch.int32)[:, None]
    return problem


#: of the GPU that is not there: fewer than most cases have blocks of queries
PROCESSORS = 3

#: four heads of queries for each of keys, whose 48 MiB are more than what the cache is for
SHARED = (("q8", 96), ("k8", 24), ("v8", 24))


class InTorch:
    """The kernel as it is launched, run in PyTorch."""

    arg_names = forward_fp8_sm90.attention_forward_fp8_sm90.arg_names

    def __getitem__(self, grid: Any) -> Any:
        def launched(*, num_warps: int, num_stages: int, enable_fp_fusion: bool, **given: Any) -> None:
            gluon_in_torch.run(forward_fp8_sm90, "attention_forward_fp8_sm90", grid, given)

        return launched


def in_torch(given: problems.Fp8Problem, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """out and lse on a CPU."""
    monkeypatch.setattr(fp8_launch, "_descriptor", lambda x, tile: gluon_in_torch.Descriptor(x, tuple(tile)))
    monkeypatch.setattr(persistent, "programs", lambda blocks, device: (min(blocks, PROCESSORS), 1, 1))
    stand_in = types.SimpleNamespace(attention_forward_fp8_sm90=InTorch())
    monkeypatch.setattr(fp8_launch, "forward_fp8_sm90", stand_in)
    with kernel_problems.planned(given.problem.plan), torch.no_grad():
        tensors = (given.problem.q, given.problem.k, given.problem.v, given.operands)
        return fp8_launch.forward(*tensors, given.problem.text)


def assert_near(given: problems.Fp8Problem, out: Tensor, lse: Tensor, *, share: float, atol: float) -> None:
    """Of the exact results, from what the kernel was given: share of out's norm, atol of lse."""
    q, k, v = (x.detach().float() for x in given.as_rounded)
    exact_out, exact_lse = kernel_problems.attention(given.problem, q, k, v, given.problem.named)
    assert float((out - exact_out).norm() / exact_out.norm()) < share
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=atol)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("pair", [*PAIRS, *BAND_PAIRS, *CPU_PAIRS], ids="-".join)
def test_what_the_kernel_says(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    case, recipe = pair
    given = problems.build(grown(CASES[case]), RECIPES[recipe], dtype=torch.float16, device="cpu")
    with torch.no_grad():
        out, lse = in_torch(given, monkeypatch)
        assert_near(given, out, lse, share=0.04, atol=0.02)


@pytest.mark.parametrize("name", OF_LENGTHS)
def test_batch_rows_have_numbers_of_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problems.rounded_problem(of_lengths(name, "cpu"), RECIPES["block"])
    with torch.no_grad():
        out, lse = in_torch(given, monkeypatch)
        assert_near(given, out, lse, share=0.04, atol=0.02)
    assert (lse[0] == -torch.inf).all()
    assert not out[0].any()


@pytest.mark.parametrize("left", [None, 150])
@pytest.mark.parametrize("section", [1, 4, 100])
def test_every_block_of_every_head_is_computed_once(
    section: int, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six heads, so that the last section of four is smaller."""
    sizes: dict[str, Any] = {"batch": 2, "heads_q": 3, "heads_kv": 3, "seqlen_q": 400, "seqlen_kv": 400}
    # What is found for one name is kept.
    case = Case(name=f"{section} heads, {left} to the left", band=Band(left=left, right=0), **sizes)
    given = problems.build(case, RECIPES["head"], dtype=torch.float16, device="cpu")
    monkeypatch.setattr(persistent, "section", lambda k, v, *, heads_q, reach: section)
    with torch.no_grad():
        out, lse = in_torch(given, monkeypatch)
        assert_near(given, out, lse, share=0.04, atol=0.02)


def test_blocks_of_v_may_differ_by_far(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(BY_NAME["even"], name="blocks", seqlen_q=300, seqlen_kv=300, band=None, head_dim=64)
    problem = kernel_problems.build(case, dtype=torch.float16, device="cpu")
    with torch.no_grad():
        for name, factor in (("q", 2.0), ("k", 2.0), ("v", 20.0)):
            getattr(problem, name)[:, :, 128:256] *= factor
    given = problems.rounded_problem(problem, RECIPES["head"])
    out, _ = in_torch(given, monkeypatch)
    with torch.no_grad():
        exact, _ = kernel_problems.attention(problem, *(x.detach().float() for x in given.as_rounded), {})
        assert float((out - exact).norm() / exact.norm()) < 0.04


def test_the_last_keys_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first key with nearly all of the weight, visited first, would leave nothing of others. Now it does in its own tile of 128."""
    case = Case(name="sink", batch=1, heads_q=1, seqlen_q=64, seqlen_kv=512, head_dim=64, needs_grad=False)
    problem = kernel_problems.build(case, dtype=torch.float16, device="cpu")
    with torch.no_grad():
        # Scores: 13 for the first key, 0 for the others, whose weights are 2**-18.7 of it: below FP8's smallest number at 2**8.
        problem.q.fill_(1.0), problem.k.zero_(), problem.v.fill_(1.0)
        problem.k[:, :, 0], problem.v[:, :, 0] = 13.0 / 8, 0.0
    out, _ = in_torch(problems.rounded_problem(problem, RECIPES["head"]), monkeypatch)
    exact = 384 / (511 + torch.tensor(13.0).exp())
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), float(exact)), rtol=0.02, atol=0)


def test_the_wider_format(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problems.build(grown(BY_NAME["even"]), Fp8Recipe(forward_format="e5m2"), dtype=torch.float16, device="cpu")
    assert given.rounded["q8"].dtype == torch.float8_e5m2
    with torch.no_grad():
        assert_near(given, *in_torch(given, monkeypatch), share=0.08, atol=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, which has to be chosen before")
@pytest.mark.parametrize("pair", [("gqa", "head"), ("softcap", "block"), ("sinks", "int8")], ids="-".join)
def test_tritons_backward_of_what_was_rounded(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    case, recipe = pair
    monkeypatch.setattr(problems, "outputs", lambda given: in_torch(given, monkeypatch))
    given = problems.build(grown(CASES[case]), RECIPES[recipe], dtype=torch.float16)
    problems.assert_within_rule(problems.results(given), given)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_attention_and_all_gradients(pair: tuple[str, str], hopper: Target) -> None:
    case, recipe = pair
    given = problems.build(grown(CASES[case]), RECIPES[recipe], dtype=torch.bfloat16, target=hopper)
    problems.assert_within_rule(problems.results(given), given)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", BAND_PAIRS, ids="-".join)
def test_bands_on_a_gpu(pair: tuple[str, str], hopper: Target) -> None:
    case, recipe = pair
    given = problems.build(grown(CASES[case]), RECIPES[recipe], dtype=torch.float16, target=hopper)
    with torch.no_grad():
        assert_near(given, *problems.outputs(given), share=0.04, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_LENGTHS)
def test_numbers_of_keys_on_a_gpu(name: str, hopper: Target) -> None:
    given = problems.rounded_problem(of_lengths(name, "cuda"), RECIPES["block"])
    with torch.no_grad():
        assert_near(given, *problems.outputs(given), share=0.04, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [True, False])
def test_cudnn_differentiates_it(is_causal: bool, head_dim: int, hopper: Target) -> None:
    """Through the whole backend. The gradients of FP8's weights and those of exact ones differ by FP8's rounding."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    shapes = ((2, 300, 4, head_dim), (2, 300, 2, head_dim), (2, 300, 2, head_dim))
    given = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for shape in shapes
    ]
    options = {"fp8_recipe": Fp8Recipe(), "lowering": "hopper_fp8", "strict": True}
    compiled = torch.compile(attention, backend="attn_compiler", options=options, dynamic=False)
    out = compiled(*given)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, given, upstream)
    assert "sdpa_cudnn" in str(attn_compiler.reports()[-1].sites[0].notes)
    exact = [x.detach().float().requires_grad_() for x in given]
    right = attention(*exact)
    for mine, wanted in zip((out, *got), (right, *torch.autograd.grad(right, exact, upstream.float())), strict=True):
        assert float((mine.float() - wanted).norm() / wanted.norm()) < 0.08


@pytest.mark.gpu
def test_a_model_that_compares_with_numbers_of_keys(hopper: Target) -> None:
    """Through the whole backend. What lies beyond those is NaN."""

    def attention(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
        keys = torch.arange(k.shape[2], device=k.device)
        allowed = (keys < numbers[:, None, None, None]) & (keys <= torch.arange(q.shape[2], device=q.device)[:, None])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    shape = (3, 700, 2, 64)
    given = [torch.randn(shape, device="cuda").bfloat16().transpose(1, 2).requires_grad_() for _ in "qkv"]
    numbers = torch.tensor([1, 300, 700], device="cuda")
    unseen = torch.arange(700, device="cuda") >= numbers[:, None]
    with torch.no_grad():
        for x in given[1:]:
            x.masked_fill_(unseen[:, None, :, None], torch.nan)
    options = {"fp8_recipe": Fp8Recipe(), "lowering": "hopper_fp8", "strict": True}
    compiled = torch.compile(attention, backend="attn_compiler", options=options, dynamic=False)
    out = compiled(*given, numbers)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, given, upstream)
    exact = [x.detach().float().nan_to_num(0.0).requires_grad_() for x in given]
    right = attention(*exact, numbers)
    for mine, wanted in zip((out, *got), (right, *torch.autograd.grad(right, exact, upstream.float())), strict=True):
        assert float((mine.float() - wanted).norm() / wanted.norm()) < 0.08


@pytest.mark.gpu
def test_the_wider_format_is_computed_too(hopper: Target) -> None:
    recipe = Fp8Recipe(forward_format="e5m2")
    given = problems.build(grown(BY_NAME["even"]), recipe, dtype=torch.bfloat16, target=hopper)
    assert given.rounded["q8"].dtype == torch.float8_e5m2
    out = problems.outputs(given)[0]
    exact = kernel_problems.expected(given.problem, torch.float32)[0]
    assert 0.01 < numerics.worst(out, exact) < 0.3


@pytest.mark.gpu
def test_scales_of_several_blocks_are_told_apart(hopper: Target) -> None:
    case = dataclasses.replace(BY_NAME["even"], name="blocks", seqlen_q=300, seqlen_kv=300, batch=1, head_dim=64)
    given = problems.build(case, RECIPES["block"], dtype=torch.bfloat16, target=hopper)
    assert quantise.scales_of(Call.from_text(given.problem.text).spec).block == 128
    right = problems.outputs(given)[0]
    for name in ("descale_q", "descale_k", "descale_v"):
        other = dict(given.rounded) | {name: given.rounded[name].flip(-1) * 1.5}
        assert not torch.allclose(problems.outputs(dataclasses.replace(given, rounded=other))[0], right)


@pytest.mark.gpu
def test_steps_with_delayed_scaling_compile_nothing(hopper: Target) -> None:
    """And are as exact as FP8 is, once the history holds what came before."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    recipe = Fp8Recipe(scaling=DelayedScaling(amax_history_len=4))
    options = {"fp8_recipe": recipe, "lowering": "hopper_fp8", "strict": True}
    compiled = torch.compile(attention, backend="attn_compiler", options=options, dynamic=False)
    generator = torch.Generator(device="cuda").manual_seed(0)
    decided = 0
    for step in range(12):
        shape = (2, 300, 4, 64)
        given = [
            torch.randn(shape, generator=generator, device="cuda").mul(1 + step % 3 / 10).bfloat16().transpose(1, 2)
            for _ in "qkv"
        ]
        given = [x.requires_grad_() for x in given]
        out = compiled(*given)
        upstream = torch.randn_like(out)
        got = torch.autograd.grad(out, given, upstream)
        decided = len(attn_compiler.reports()) if step == 3 else decided
    assert len(attn_compiler.reports()) == decided
    exact = [x.detach().float().requires_grad_() for x in given]
    right = attention(*exact)
    for mine, wanted in zip((out, *got), (right, *torch.autograd.grad(right, exact, upstream.float())), strict=True):
        assert float((mine.float() - wanted).norm() / wanted.norm()) < 0.08
