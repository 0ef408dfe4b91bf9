from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler.lowerings import LOWERINGS, Lowering, by_name
from attn_compiler.lowerings.shared.limits import common as limits
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import Dense, MaskSpec
from attn_compiler.spec.scores import ScoreSpec, Sinks, Softcap, Unusual
from attn_compiler.spec.target import Target
from tests.lowerings.specs import UNLISTED, bias, dense, make_spec, words

H200 = Target.fake(torch="2.11.0+cu130")
CPU = Target.fake(device="cpu")
CUDA = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
ALL = (*CUDA, "sdpa_cpu_flash")
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
        ({"changes": (Softcap(cap=50.0),)}, "no softcap; observed softcap 50; on a GPU, leave the choice"),
        ({"changes": (Sinks(requires_grad=True),)}, "no attention sinks; observed"),
        ({"changes": (Unusual(what="top-8 keys"),)}, "observed top-8 keys"),
        ({"returns_weights": True}, "have no other reader; observed they are returned; call the model with output_att"),
        ({"mask": UNLISTED}, "the mask is causal, a tensor, or both; observed a new kind of mask"),
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
    assert "observed switched off; call torch.backends.cuda.enable_" in words(by_name(name).unavailable(off))
    assert "switched off" in why_not(name, make_spec(), off)
    others = dataclasses.replace(target, disabled=frozenset({"flash", "efficient", "cudnn", "math"} - {kernel}))
    assert why_not(name, make_spec(), others) == ""


def test_a_machine_without_the_kernel_is_the_only_reason() -> None:
    spec = make_spec(dtype="float32", changes=(Softcap(cap=1.0),))
    assert len(by_name("sdpa_cudnn").why_not(spec, CPU)) == 1


def test_cpu_flash_runs_on_the_cpu_alone() -> None:
    assert words(by_name("sdpa_cpu_flash").unavailable(H200)).startswith("runs on the CPU; observed device cuda; ")
    assert "on cpu; observed device cuda; " in words(by_name("sdpa_cpu_flash").why_not(make_spec(), CPU))


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
    assert "head_dim_qk is a multiple of 8; observed 100; pad the heads with zeros to 104, and keep" in reasons


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


# ---- mask tensors -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("scale", "rules"), [(256.0, 0), (1e4, 1), (-0.5, 1)])
def test_a_scale_is_positive_and_not_large(scale: float, rules: int) -> None:
    reasons = limits.check_scale(dataclasses.replace(SPEC, score=ScoreSpec(scale=scale)))
    assert len(reasons) == rules


def test_a_kernel_that_takes_negative_scales_takes_no_large_one() -> None:
    assert limits.check_largest_scale(dataclasses.replace(SPEC, score=ScoreSpec(scale=-0.5))) == []
    assert limits.check_largest_scale(dataclasses.replace(SPEC, score=ScoreSpec(scale=-1e4)))


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
