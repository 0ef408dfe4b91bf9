from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.lowerings import LOWERINGS, Lowering, by_name
from attn_compiler.lowerings.shared import limits
from attn_compiler.masks import Causal, CausalFrom, Dense, Flag, KeyPadding, MaskSpec, SlidingWindow
from attn_compiler.scores import (
    Bias,
    BiasFormula,
    Penalty,
    ProvedScore,
    RegionPenalty,
    ScoreSpec,
    Sinks,
    Softcap,
    Unusual,
)
from attn_compiler.spec import AttentionSpec, TensorSpec
from attn_compiler.target import Target
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, UNLISTED, bias, dense, make_spec, words
from tests.passes.compiling import compiled

H200 = Target.fake(torch="2.11.0+cu130")
CPU = Target.fake(device="cpu")
CUDA = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
ALL = (*CUDA, "sdpa_cpu_flash")


def why_not(name: str, spec: AttentionSpec, target: Target | None = None) -> str:
    if name == "sdpa_cpu_flash":
        return words(by_name(name).why_not(dataclasses.replace(spec, device="cpu"), target or CPU))
    return words(by_name(name).why_not(spec, target or H200))


def takes(name: str, **changes: Any) -> bool:
    return why_not(name, make_spec(**changes)) == ""


@pytest.mark.parametrize("name", ALL)
def test_the_plain_case_is_served(name: str) -> None:
    assert why_not(name, make_spec()) == ""
    assert why_not(name, make_spec(needs_grad=False)) == ""


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"changes": (Softcap(cap=50.0),)}, "no softcap; observed softcap 50; if accuracy allows"),
        ({"changes": (Sinks(requires_grad=True),)}, "no attention sinks; observed"),
        ({"changes": (Unusual(what="top-8 keys"),)}, "observed top-8 keys"),
        ({"returns_weights": True}, "have no other reader; observed they are returned; call the model with output_att"),
        (
            {"mask": UNLISTED},
            "the mask is causal, a tensor, or both; observed a new kind of mask",
        ),
        ({"scale": -0.125}, "the scale is positive; observed -0.125"),
        ({"softmax_dtype": "float64"}, "the softmax runs in at most float32; observed float64"),
        ({"seqlen_q": 0}, "no axis can be empty; observed seqlen_q 0"),
        ({"seqlen_kv": "u0"}, "no axis can be empty; observed seqlen_kv u0; compile with dynamic=False"),
        ({"heads": "s0"}, "the numbers of heads are known; observed num_heads_q s0, num_heads_kv 8"),
        ({"heads": 6, "heads_kv": 4}, "num_heads_q is a multiple of num_heads_kv"),
        ({"head_dim": "u0"}, "head_dim_qk is known; observed u0"),
        ({"mask": dense(2, 8, 128, 64)}, "the mask broadcasts to (2, 8, 128, 128); observed (2, 8, 128, 64)"),
        ({"mask": dense(2, 1, "s0", 128)}, "observed (2, 1, s0, 128)"),
        ({"mask": dense(1, 1, 128, 128), "changes": (bias(1, 8, 128, 128),)}, "one tensor is added to the scores"),
    ],
)
def test_what_no_kernel_does(name: str, changes: dict[str, Any], expected: str) -> None:
    if name == "sdpa_flash" and "mask" in changes and changes["mask"] is not UNLISTED:
        expected = "no mask tensor; observed"
    assert expected in why_not(name, make_spec(**changes))


@pytest.mark.parametrize("name", ALL)
def test_tensors_that_disagree(name: str) -> None:
    spec = make_spec()
    mixed = dataclasses.replace(spec, v=dataclasses.replace(spec.v, dtype="float32"))
    assert "q, k and v have one dtype; observed q bfloat16, k bfloat16, v float32" in why_not(name, mixed)
    short = dataclasses.replace(spec, v=dataclasses.replace(spec.v, shape=(2, 8, 64, 64)))
    assert "k and v have one seqlen_kv; observed k 128, v 64" in why_not(name, short)
    batch = dataclasses.replace(spec, q=dataclasses.replace(spec.q, shape=(4, 8, 128, 64)))
    assert "q and k have one batch; observed q 4, k 2" in why_not(name, batch)
    wide = dataclasses.replace(spec, q=dataclasses.replace(spec.q, shape=(2, 8, 128, 128)))
    assert "q and k have one head_dim; observed q 128, k 64" in why_not(name, wide)


@pytest.mark.parametrize("name", CUDA)
def test_where_it_runs(name: str) -> None:
    lowering = by_name(name)
    assert "runs on an NVIDIA GPU; observed device cpu" in words(lowering.unavailable(CPU))
    assert "no GPU that CUDA can use" in words(lowering.unavailable(Target.fake(sm=0)))
    assert "observed sm130" in words(lowering.unavailable(Target.fake(sm=130)))
    assert (words(lowering.unavailable(Target.fake(sm=75))) == "") == (name == "sdpa_efficient")
    assert words(lowering.unavailable(Target.fake(sm=80))) == ""
    assert "q, k and v are on cuda; observed device cpu" in why_not(name, make_spec(device="cpu"))


@pytest.mark.parametrize("name", ALL)
def test_a_switch_of_the_user_is_respected(name: str) -> None:
    kernel = by_name(name).kernel  # type: ignore[attr-defined]
    target = CPU if name == "sdpa_cpu_flash" else H200
    off = dataclasses.replace(target, disabled=frozenset({kernel}))
    assert "is enabled; observed switched off; torch.backends.cuda.enable_" in words(by_name(name).unavailable(off))
    assert "switched off" in why_not(name, make_spec(), off)
    others = dataclasses.replace(target, disabled=frozenset({"flash", "efficient", "cudnn", "math"} - {kernel}))
    assert why_not(name, make_spec(), others) == ""


def test_a_machine_without_the_kernel_is_the_only_reason() -> None:
    spec = make_spec(dtype="float32", changes=(Softcap(cap=1.0),))
    assert len(by_name("sdpa_cudnn").why_not(spec, CPU)) == 1


def test_cpu_flash_runs_on_the_cpu_alone() -> None:
    assert words(by_name("sdpa_cpu_flash").unavailable(H200)) == "runs on the CPU; observed device cuda (AC102)"
    assert "on cpu; observed device cuda (AC102)" in words(by_name("sdpa_cpu_flash").why_not(make_spec(), CPU))


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("sdpa_cudnn", {"float16", "bfloat16"}),
        ("sdpa_flash", {"float16", "bfloat16"}),
        ("sdpa_efficient", {"float16", "bfloat16", "float32"}),
        ("sdpa_cpu_flash", {"float16", "bfloat16", "float32", "float64"}),
    ],
)
def test_dtypes(name: str, dtypes: set[str]) -> None:
    every = {"float16", "bfloat16", "float32", "float64", "float8_e4m3fn"}
    assert {dtype for dtype in every if takes(name, dtype=dtype)} == dtypes
    if "float32" not in dtypes:
        assert "call model.bfloat16()" in why_not(name, make_spec(dtype="float32"))


def test_bfloat16_needs_ampere() -> None:
    old = Target.fake(sm=75)
    assert "q is float16 or float32; observed bfloat16" in why_not("sdpa_efficient", make_spec(), old)
    assert why_not("sdpa_efficient", make_spec(dtype="float16"), old) == ""


@pytest.mark.parametrize(
    ("name", "dtype", "taken"),
    [
        ("sdpa_cudnn", "bfloat16", {8, 64, 72, 128, 256}),
        ("sdpa_flash", "bfloat16", {8, 64, 72, 128, 256}),
        ("sdpa_efficient", "bfloat16", {8, 64, 72, 128, 256, 264}),
        ("sdpa_efficient", "float32", {4, 8, 36, 64, 72, 100, 128, 256, 264}),
        ("sdpa_cpu_flash", "float32", {1, 4, 8, 36, 64, 72, 100, 128, 256, 264}),
    ],
)
def test_head_dims(name: str, dtype: str, taken: set[int]) -> None:
    sizes = {1, 4, 8, 36, 64, 72, 100, 128, 256, 264}
    assert {size for size in sizes if takes(name, dtype=dtype, head_dim=size)} == taken


def test_symbolic_heads_and_head_dims() -> None:
    assert {name for name in ALL if takes(name, heads="s0", heads_kv="s0")} == set(ALL)
    assert {name for name in ALL if takes(name, head_dim="s0")} == {"sdpa_cpu_flash"}
    assert not takes("sdpa_cpu_flash", head_dim="s0", head_dim_v="s1")
    assert not takes("sdpa_cpu_flash", heads="u0", heads_kv="u0")


def test_a_head_dim_off_the_multiple_comes_with_the_size_to_pad_to() -> None:
    reasons = why_not("sdpa_flash", make_spec(head_dim=100))
    assert "head_dim_qk is a multiple of 8; observed 100; pad it with zeros to 104 and keep the scale" in reasons


@pytest.mark.parametrize(
    ("name", "taken"),
    [("sdpa_cudnn", True), ("sdpa_flash", False), ("sdpa_efficient", True), ("sdpa_cpu_flash", False)],
)
def test_unequal_head_dims(name: str, taken: bool) -> None:
    assert takes(name, head_dim=128, head_dim_v=64) == taken


@pytest.mark.parametrize("sm", [86, 89, 120, 121])
def test_flash_trains_large_heads_only_on_some_gpus(sm: int) -> None:
    def on(target_sm: int, **changes: Any) -> str:
        return why_not("sdpa_flash", make_spec(**changes), Target.fake(sm=target_sm))

    assert on(sm, head_dim=192) == ""
    assert "head_dim is at most 192, or above 224 without dropout" in on(sm, head_dim=224)
    assert on(sm, head_dim=256) == ""
    assert "head_dim 256, dropout 0.1" in on(sm, head_dim=256, dropout_p=0.1)
    assert on(sm, head_dim=224, needs_grad=False) == ""
    assert on(80, head_dim=224) == on(90, head_dim=224) == ""


@pytest.mark.parametrize("name", ALL)
def test_grouped_heads(name: str) -> None:
    assert takes(name, heads_kv=2)
    assert takes(name, heads_kv=1)


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_flash"])
def test_the_grid_is_limited(name: str) -> None:
    assert "batch and heads are at most 65535; observed batch 65536" in why_not(name, make_spec(batch=65536))
    assert takes(name, batch="s0")


def test_the_grid_limits_the_efficient_kernel_only_with_dropout() -> None:
    assert takes("sdpa_efficient", batch=65536)
    assert not takes("sdpa_efficient", batch=65536, dropout_p=0.1)


# ---- causal masks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "mask", "taken"),
    [
        ((128, 128), CAUSAL, {"sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa_cpu_flash"}),
        (("s0", "s0"), CAUSAL, {"sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa_cpu_flash"}),
        ((128, 256), CAUSAL, {"sdpa_cudnn", "sdpa_efficient", "sdpa_cpu_flash"}),
        (("s0", "s1"), CAUSAL, {"sdpa_cudnn", "sdpa_efficient", "sdpa_cpu_flash"}),
        ((128, 128), BOTTOM_RIGHT, {"sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa_cpu_flash"}),
        (("s0", "s0"), BOTTOM_RIGHT, {"sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa_cpu_flash"}),
        ((128, 256), BOTTOM_RIGHT, {"sdpa_flash"}),
        ((2, "s0"), BOTTOM_RIGHT, {"sdpa_flash"}),
        ((128, "s0"), BOTTOM_RIGHT, set()),
        ((256, 128), BOTTOM_RIGHT, set()),
        (("s0", "s1"), BOTTOM_RIGHT, set()),
    ],
)
def test_causal_masks(lengths: tuple[Any, Any], mask: MaskSpec, taken: set[str]) -> None:
    spec = make_spec(seqlen_q=lengths[0], seqlen_kv=lengths[1], mask=mask, needs_grad=False)
    assert {name for name in ALL if why_not(name, spec) == ""} == taken


@pytest.mark.parametrize("name", ALL)
def test_one_query_at_the_end_sees_all_keys(name: str) -> None:
    spec = make_spec(seqlen_q=1, seqlen_kv=512, mask=BOTTOM_RIGHT, needs_grad=False)
    assert why_not(name, spec) == ""
    assert not limits.causal_flag(spec)
    assert limits.causal_flag(make_spec(mask=BOTTOM_RIGHT))
    assert limits.causal_flag(make_spec(seqlen_q=1, seqlen_kv=512, mask=CAUSAL))
    assert not limits.causal_flag(make_spec())


def test_flash_says_what_it_needs_of_the_lengths() -> None:
    reasons = why_not("sdpa_flash", make_spec(seqlen_q="s0", seqlen_kv="s1", mask=CAUSAL))
    assert "as many queries as keys; observed seqlen_q s0, seqlen_kv s1; compile with dynamic=False" in reasons


@pytest.mark.parametrize(
    ("name", "taken"),
    [("sdpa_cudnn", False), ("sdpa_flash", False), ("sdpa_efficient", False), ("sdpa_cpu_flash", True)],
)
def test_a_causal_mask_and_a_tensor(name: str, taken: bool) -> None:
    both = MaskSpec(kinds=(Causal(),), flag=Flag.CALLED, dense=Dense(shape=(2, 1, 1, 128), dtype="bool"))
    assert takes(name, mask=both, needs_grad=False) == taken
    if not taken:
        assert "put the diagonal into the mask tensor" in why_not(name, make_spec(mask=both)) or name == "sdpa_flash"


# ---- mask tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient", "sdpa_cpu_flash"])
@pytest.mark.parametrize("shape", [(2, 8, 128, 128), (1, 1, 1, 128), (2, 1, 1, 1), (128, 128), (128,), (8, 1, 128)])
def test_mask_shapes(name: str, shape: tuple[int, ...]) -> None:
    assert takes(name, mask=dense(*shape), needs_grad=False)
    assert takes(name, mask=dense(*shape, dtype="bfloat16"), needs_grad=False)


def test_flash_reads_no_mask_tensor() -> None:
    reasons = why_not("sdpa_flash", make_spec(mask=dense(1, 1, 128, 128)))
    assert "no mask tensor; observed dense bool[1, 1, 128, 128]; pass is_causal=True or no mask" in reasons


@pytest.mark.parametrize(
    ("name", "dtype", "mask_dtype", "taken"),
    [
        ("sdpa_efficient", "bfloat16", "float32", False),
        ("sdpa_efficient", "bfloat16", "float16", False),
        ("sdpa_efficient", "float32", "bfloat16", True),
        ("sdpa_efficient", "float32", "float64", False),
        ("sdpa_cudnn", "bfloat16", "float32", False),
        ("sdpa_cudnn", "float16", "bfloat16", False),
        ("sdpa_cpu_flash", "bfloat16", "float32", True),
        ("sdpa_cpu_flash", "bfloat16", "float16", False),
        ("sdpa_cpu_flash", "float32", "float16", True),
        ("sdpa_cpu_flash", "float64", "float32", True),
    ],
)
def test_mask_dtypes(name: str, dtype: str, mask_dtype: str, taken: bool) -> None:
    spec = make_spec(dtype=dtype, mask=dense(1, 1, 128, 128, dtype=mask_dtype), needs_grad=False)
    assert (why_not(name, spec) == "") == taken
    if not taken:
        assert f"observed {mask_dtype}; cast it to {dtype} if rounding does it no harm" in why_not(name, spec)


@pytest.mark.parametrize(
    ("name", "taken"),
    [("sdpa_cudnn", False), ("sdpa_flash", False), ("sdpa_efficient", True), ("sdpa_cpu_flash", False)],
)
def test_only_the_efficient_kernel_gives_a_bias_its_gradient(name: str, taken: bool) -> None:
    learned = bias(1, 8, 128, 128)
    assert takes(name, changes=(learned,)) == taken
    if not taken and name != "sdpa_flash":
        assert "the bias needs no gradient; observed bias[1, 8, 128, 128]" in why_not(
            name, make_spec(changes=(learned,))
        )
    for frozen in (
        {"changes": (learned,), "needs_grad": False},
        {"changes": (bias(1, 8, 128, 128, requires_grad=False),)},
    ):
        assert takes(name, **frozen) == (name != "sdpa_flash")


# ---- dropout and determinism ------------------------------------------------------------------------------------------


def test_dropout() -> None:
    assert takes("sdpa_flash", dropout_p=0.1)
    assert takes("sdpa_efficient", dropout_p=0.1)
    reasons = why_not("sdpa_cpu_flash", make_spec(dropout_p=0.1))
    assert (
        reasons
        == "no dropout; observed 0.1; set attention_dropout=0.0 in the model's config, or call model.eval() (AC213)"
    )


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient"])
def test_kernels_with_a_deterministic_backward_serve_deterministic_mode(name: str) -> None:
    assert why_not(name, make_spec(), Target.fake(deterministic=True)) == ""


@pytest.mark.parametrize(
    ("version", "release"), [("2.13.0+cpu", (2, 13)), ("2.15.0a0+gitd0f2af8", (2, 15)), ("", (2, 11))]
)
def test_torch_release(version: str, release: tuple[int, int]) -> None:
    assert limits.torch_release(version) == release


def test_a_kind_that_neither_a_flag_nor_a_tensor_says_is_refused() -> None:
    window = MaskSpec(kinds=(Causal(), SlidingWindow(left=7, right=None)), flag=Flag.CALLED)
    (reason,) = limits.check_masks(make_spec(mask=window))
    assert reason.observed == "window (7 back)"
    tensor = dataclasses.replace(window, dense=Dense(shape=(2, 1, 128, 128), dtype="bool"))
    assert limits.check_masks(make_spec(mask=tensor)) == []
    assert limits.check_masks(make_spec(mask=window, changes=(bias(1, 8, 128, 128),))) == []


PADDING = KeyPadding(condition=Load("real", (Index("b"), Index("k")), "bool"))
NUMBERS = Dense(shape=(2, 1, 128, 128), dtype="float32")
GIVEN = MaskSpec(dense=NUMBERS, reason="mask is an input of the graph: it may mask too")


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"mask": MaskSpec(dense=NUMBERS, kinds=(Causal(), PADDING))}, True),
        ({"mask": MaskSpec(dense=NUMBERS, kinds=(CausalFrom(offset=Const(-1)),))}, True),
        ({"mask": MaskSpec(dense=NUMBERS, kinds=(Causal(), PADDING)), "needs_grad": False}, False),
        ({"mask": MaskSpec(kinds=(Causal(), PADDING), dense=Dense(shape=(2, 1, 128, 128), dtype="bool"))}, False),
        ({"mask": MaskSpec(dense=NUMBERS, kinds=(Causal(), SlidingWindow(left=7, right=None)))}, False),
        ({"mask": MaskSpec(dense=NUMBERS, kinds=(PADDING,))}, False),
        ({"mask": GIVEN, "decomposed": True}, True),
        ({"mask": GIVEN}, False),
    ],
    ids="left_padding strictly_causal no_gradient bool window all_padding given given_to_sdpa".split(),
)
def test_numbers_that_mask_all_keys_of_a_query_on_the_cpu(changes: dict[str, Any], is_refused: bool) -> None:
    found = why_not("sdpa_cpu_flash", make_spec(dtype="float32", **changes))
    assert found.startswith("with gradients, numbers that mask leave each query some key; observed") == is_refused
    assert bool(found) == is_refused


@pytest.mark.parametrize("how", ["given", "made"])
def test_a_query_without_keys_gets_the_models_gradient(how: str) -> None:
    """Each of its keys would count as the only one: 24 times the gradient."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, 320, 16, generator=generator).requires_grad_()
    real = torch.ones(2, 320, dtype=torch.bool)
    real[1, :24] = False
    lowest, slopes = torch.finfo(torch.float32).min, torch.tensor([0.5, 0.25])

    def masked(q: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        at = torch.arange(320)
        alibi = slopes[:, None, None] * (at - at[:, None])
        return torch.where((at <= at[:, None]) & real[:, None, None, :], alibi, lowest)

    def attend(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ q.mT * 0.25 + mask, -1) @ q

    def model(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return attend(q, x if how == "given" else masked(q, x))

    x = masked(q, real) if how == "given" else real
    run = compiled(model)
    (mine,), (right,) = (torch.autograd.grad(f(q, x).square().sum(), q) for f in (run, model))
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    assert "leave each query some key" in str(run.site.decision.refusals)


MASK = Load("mask", (Index("k"),), "float")
LATER = ix.compare(">", Index("k"), Index("q"))
SPEC = AttentionSpec(
    q=TensorSpec(shape=(1, 2, 6, 8), strides=(96, 48, 8, 1), dtype="float32"),
    k=TensorSpec(shape=(1, 2, 6, 8), strides=(96, 48, 8, 1), dtype="float32"),
    v=TensorSpec(shape=(1, 2, 6, 8), strides=(96, 48, 8, 1), dtype="float32"),
    mask=MaskSpec(dense=Dense(shape=(1, 1, 6, 6), dtype="float32")),
    score=ScoreSpec(scale=0.5),
    device="cpu",
    out_dtype="float32",
    needs_grad=True,
)


@pytest.mark.parametrize(
    ("kind", "large"),
    [
        (Penalty(value=1e9, condition=LATER), True),
        (Penalty(value=-1e9, condition=LATER), True),
        (Penalty(value=-10000.0, condition=LATER), True),
        (Penalty(value=2000.0, condition=LATER), False),
        (RegionPenalty(value=-100.0, of_key=Index("k")), False),
        (BiasFormula(value=ix.add(ix.where(LATER, Const(-1e9), Const(0.0)), Const(1e9))), True),
        # (1 - mask) · -1e9 masks; mask · 1e9 does not.
        (BiasFormula(value=ix.mul(ix.add(Const(1.0), ix.mul(MASK, Const(-1.0))), Const(-1e9))), False),
        (BiasFormula(value=ix.mul(MASK, Const(1e9))), True),
        (Bias(tensor="bias", at=(Index("q"), Index("k")), shape=(1, 1, 6, 6)), False),
    ],
)
def test_an_lse_holds_no_large_numbers(kind: ProvedScore, large: bool) -> None:
    spec = dataclasses.replace(SPEC, score=ScoreSpec(scale=0.5, proved=(kind,)))
    reasons = limits.check_tensor(spec, dtypes=("float32",))
    assert [reason.observed for reason in reasons] == ([kind.words] if large else [])
    assert all(reason.remedy for reason in reasons)
    assert limits.check_tensor(dataclasses.replace(spec, needs_grad=False), dtypes=("float32",)) == []
    assert limits.check_tensor(_in(spec, "float64"), dtypes=("float32",)) == []


@pytest.mark.parametrize(("scale", "rules"), [(256.0, 0), (1e4, 1), (-0.5, 1)])
def test_a_scale_is_positive_and_not_large(scale: float, rules: int) -> None:
    reasons = limits.check_scale(dataclasses.replace(SPEC, score=ScoreSpec(scale=scale)))
    assert len(reasons) == rules
    assert all(reason.remedy for reason in reasons)


def test_a_kernel_that_takes_negative_scales_takes_no_large_one() -> None:
    assert limits.check_largest_scale(dataclasses.replace(SPEC, score=ScoreSpec(scale=-0.5))) == []
    assert limits.check_largest_scale(dataclasses.replace(SPEC, score=ScoreSpec(scale=-1e4)))


@pytest.mark.parametrize(("cap", "refused"), [(50.0, False), (3000.0, True)])
def test_an_lse_holds_no_large_softcap(cap: float, refused: bool) -> None:
    spec = dataclasses.replace(SPEC, score=ScoreSpec(scale=0.5, changes=(Softcap(cap=cap),)))
    assert bool(limits.check_no_large_numbers(spec)) is refused
    assert not limits.check_no_large_numbers(dataclasses.replace(spec, needs_grad=False))


def test_half_precision_asks_for_fewer_digits() -> None:
    spec = dataclasses.replace(SPEC, score=ScoreSpec(scale=0.5, proved=(Penalty(value=30000.0, condition=LATER),)))
    assert limits.check_tensor(spec, dtypes=("float32",))
    assert limits.check_tensor(_in(spec, "bfloat16"), dtypes=("float32",)) == []


def _in(spec: AttentionSpec, dtype: str) -> AttentionSpec:
    return dataclasses.replace(spec, **{name: dataclasses.replace(spec.q, dtype=dtype) for name in "qkv"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _New:
    """A score change that no kernel has heard of."""

    words: str = "a new one"


@pytest.mark.parametrize("lowering", LOWERINGS, ids=lambda lowering: lowering.name)
def test_a_new_kind_of_score_change_is_applied_by_nobody(lowering: Lowering) -> None:
    changed = ScoreSpec(scale=0.125, changes=(_New(),))  # type: ignore[arg-type]
    for target in (Target.fake(), Target.fake(device="cpu"), Target.fake(device="cpu", triton_interpreted=True)):
        if lowering.name == "untouched" or lowering.unavailable(target):
            continue
        spec = dataclasses.replace(
            make_spec(dtype="float32" if target.device == "cpu" else "bfloat16"), device=target.device
        )
        assert lowering.why_not(dataclasses.replace(spec, score=changed), target), target
