"""What each family of kernels takes and refuses, on which machines: one table, a line for each thing that is said.

said: words of its refusals; "" where it takes the site. A family's sizes and machine are those of FAMILIES unless a line says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from attn_compiler import Fp8Recipe, index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.cudnn import takes as cudnn
from attn_compiler.lowerings.decode import takes as decode
from attn_compiler.lowerings.fa4 import takes as fa4
from attn_compiler.lowerings.hopper import takes as hopper
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.limits.common import LAST_SM
from attn_compiler.lowerings.shared.limits.takes import Takes, check_gpu, refused
from attn_compiler.lowerings.shared.parts.site_parts import ADDED, MASKING
from attn_compiler.spec import scores
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import Causal, CausalFrom, Dense, Document, KeyPadding, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, UNLISTED, bias, dense, make_spec, words

FA4, FRONTEND = "4.0.0b36", "1.22.1"
H200 = Target.fake(flash_attn_4=FA4, cudnn_frontend=FRONTEND)
B200 = Target.fake(sm=100, flash_attn_4=FA4)
INTERPRETED = Target.fake(device="cpu", triton_interpreted=True)

_AT = (Index("b"), Index("k"))
KEPT = KeyPadding(condition=ix.as_bool(Load("kept", _AT, "int")))
IDS = Document(of_key=Load("ids", _AT, "int"))
CHANGED = (Softcap(cap=30.0), Sinks(requires_grad=True))
UNUSUAL = (scores.Unusual(what="a tanh twice"),)


def proved(*kinds: Any, queries: int | str = 128, keys: int | str = 128) -> MaskSpec:
    return MaskSpec(kinds=kinds, dense=Dense(shape=(2, 1, queries, keys), dtype="bool"))


def window(left: int | None, right: int | None = None, **sizes: Any) -> MaskSpec:
    return proved(SlidingWindow(left=left, right=right), **sizes)


def laid(spec: AttentionSpec) -> AttentionSpec:
    """The spec with q, k and v as views of contiguous BSHD memory, where their sizes are known."""

    def strides(x: TensorSpec) -> TensorSpec:
        if not all(isinstance(size, int) for size in x.shape):
            return x
        _, heads, seqlen, head_dim = map(int, x.shape)
        return dataclasses.replace(x, strides=(seqlen * heads * head_dim, head_dim, heads * head_dim, 1))

    return dataclasses.replace(spec, q=strides(spec.q), k=strides(spec.k), v=strides(spec.v))


LONG: dict[str, Any] = {"seqlen_q": 4096, "seqlen_kv": 4096}
MANY: dict[str, Any] = {"batch": 8, "heads": 32, "heads_kv": 32, "seqlen_q": 2112, "seqlen_kv": 2048}
FAMILIES: dict[str, tuple[dict[str, Any], Callable[[AttentionSpec], AttentionSpec]]] = {
    "triton": ({}, lambda spec: spec),
    "fa4": ({}, lambda spec: spec),
    "cudnn": ({}, laid),
    "decode": ({"seqlen_q": 1, "needs_grad": False}, lambda spec: spec),
    "hopper": (LONG, lambda spec: spec),
    "hopper_fp8": (LONG | {"head_dim": 128, "mask": CAUSAL}, lambda spec: dataclasses.replace(spec, fp8=Fp8Recipe())),
}

#: family, machine, words of why it does not run there
MACHINES: list[tuple[str, Target, str]] = [
    ("triton", H200, ""),
    ("triton", Target.fake(sm=80), ""),
    ("triton", Target.fake(sm=75), "from sm80"),
    ("triton", Target.fake(triton=""), "no Triton"),
    ("triton", Target.fake(triton="3.5.1"), "3.5.1"),
    ("triton", Target.fake(triton="3.10.0+git"), ""),
    ("triton", Target.fake(device="cpu"), "device cpu"),
    ("triton", INTERPRETED, ""),
    ("triton", Target.fake(device="cpu", triton_interpreted=True, triton=""), "no Triton"),
    ("decode", H200, ""),
    ("decode", Target.fake(sm=80), ""),
    ("decode", Target.fake(sm=75), "from sm80"),
    ("decode", Target.fake(triton=""), "no Triton"),
    ("fa4", H200, ""),
    ("fa4", B200, ""),
    ("fa4", Target.fake(sm=103, flash_attn_4=FA4), ""),
    ("fa4", Target.fake(sm=80, flash_attn_4=FA4), "from sm90"),
    ("fa4", Target.fake(sm=91, flash_attn_4=FA4), "observed sm91"),
    ("fa4", Target.fake(sm=120, flash_attn_4=FA4), "sm90 or sm100 to sm109; observed sm120"),
    ("fa4", Target.fake(device="cpu", flash_attn_4=FA4), "device cpu"),
    ("fa4", Target.fake(), "observed none; pip install 'flash-attn-4==4.0.0b36'"),
    ("fa4", Target.fake(flash_attn_4="4.0.0b33"), "observed 4.0.0b33"),
    ("fa4", Target.fake(flash_attn_4="4.0.0b34"), ""),
    ("fa4", Target.fake(flash_attn_4="4.0.0b37"), "4.0.0b34 to 4.0.0b36 is installed; observed 4.0.0b37"),
    ("fa4", Target.fake(flash_attn_4="4.0.0"), "observed 4.0.0;"),
    ("fa4", Target.fake(flash_attn_4=FA4, mixed_gpus=True), "CUDA_VISIBLE_DEVICES"),
    ("hopper", H200, ""),
    ("hopper", Target.fake(sm=80), "sm80"),
    ("hopper", Target.fake(sm=100), "sm100"),
    ("hopper", Target.fake(triton="3.5.1"), "Triton 3.6 or newer"),
    ("hopper", Target.fake(triton="3.7.1"), ""),
    ("hopper", Target.fake(triton="3.9.0"), ""),
    ("hopper", Target.fake(triton="3.10.0"), "compiled with Triton 3.6, 3.7, 3.8 or 3.9; observed 3.10.0"),
    ("hopper", Target.fake(device="cpu"), "device cpu"),
    ("hopper", INTERPRETED, "interpreter"),
    *(("hopper_fp8", Target.fake(sm=sm), "" if sm == 90 else f"sm{sm}") for sm in (80, 89, 90, 100, 120)),
    ("cudnn", H200, ""),
    ("cudnn", Target.fake(), "nvidia-cudnn-frontend from 1.22 to before 1.33; observed not installed; pip install"),
    *(("cudnn", Target.fake(cudnn_frontend=x), "") for x in ("1.22.0", "1.23.0", "1.27.0", "1.32.0")),
    *(("cudnn", Target.fake(cudnn_frontend=x), x) for x in ("1.21.0", "1.33.0")),
    *(("cudnn", Target.fake(cudnn_frontend=x, cudnn=92_200), "") for x in ("1.24.1", "1.25.0", "1.26.2")),
    *(
        (
            "cudnn",
            Target.fake(cudnn_frontend=x, cudnn=92_100),
            f"cuDNN 9.22.0 or newer, which knows their reshape mode; observed {x}, cuDNN 9.21.0",
        )
        for x in ("1.24.1", "1.25.0", "1.26.2")
    ),
    ("cudnn", Target.fake(cudnn_frontend=FRONTEND, device="cpu"), "device cpu"),
    ("cudnn", Target.fake(cudnn_frontend=FRONTEND, sm=75), "sm75"),
    ("cudnn", Target.fake(cudnn_frontend=FRONTEND, sm=80), ""),
    ("cudnn", Target.fake(cudnn_frontend=FRONTEND, sm=LAST_SM), ""),
    ("cudnn", Target.fake(cudnn_frontend=FRONTEND, sm=LAST_SM + 1), f"sm{LAST_SM + 1}"),
    ("cudnn", Target.fake(cudnn_frontend=FRONTEND, cudnn=0), "none"),
    ("cudnn", Target.fake(cudnn_frontend=FRONTEND, cudnn=91_200), "9.12.0"),
    ("cudnn", Target.fake(cudnn_frontend=FRONTEND, disabled=frozenset({"cudnn"})), "switched off"),
]


@pytest.mark.parametrize(("family", "machine", "said"), MACHINES, ids=str)
def test_where_it_runs(family: str, machine: Target, said: str) -> None:
    lowering = by_name(family)
    # Which frontend cuDNN has is asked of each site.
    reasons = words(
        lowering.unavailable(machine) or (family == "cudnn" and lowering.why_not(_asked(family, {}), machine)) or []
    )
    assert said in reasons
    assert bool(reasons) is bool(said)


#: families, what is asked of them, words of why they refuse
SITES: list[tuple[str, dict[str, Any], str]] = [
    ("triton fa4 cudnn decode hopper", {}, ""),
    ("triton fa4 hopper", {"mask": CAUSAL, "changes": CHANGED}, ""),
    ("triton fa4 cudnn hopper", {"head_dim": 256}, ""),
    ("triton fa4 cudnn hopper", {"dtype": "float16", "mask": CAUSAL}, ""),
    ("triton fa4 cudnn decode", {"head_dim": 192, "head_dim_v": 128}, ""),
    ("triton fa4 cudnn decode", {"heads": 8, "heads_kv": 2}, ""),
    ("fa4 cudnn hopper decode triton", {"returns_weights": True}, "no other reader"),
    ("fa4 triton", {"softmax_dtype": "float64"}, "at most float32"),
    ("fa4 triton", {"changes": UNUSUAL}, "a tanh twice"),
    ("fa4 triton", {"mask": UNLISTED}, "a new kind of mask"),
    ("fa4 triton", {"heads": 8, "heads_kv": 3}, "multiple"),
    ("fa4 triton", {"head_dim": "s3"}, "head_dim_qk is known"),
    ("fa4 triton decode", {"device": "cpu"}, "q, k and v are on cuda"),
    ("fa4 cudnn", {"head_dim": 264}, "head_dim_qk is at most 256"),
    ("triton decode hopper", {"head_dim": 520}, "head_dim_qk is at most 512"),
    ("fa4 cudnn", {"head_dim": 60}, "head_dim_qk is a multiple of 8"),
    ("triton decode", {"head_dim": 36}, "head_dim_qk is a multiple of 8"),
    ("fa4 cudnn hopper", {"dtype": "float32"}, "observed float32"),
    ("triton decode", {"dtype": "float64"}, "q is bfloat16 or float16 or float32"),
    ("fa4 cudnn", {"scale": -1.0}, "the scale is positive"),
    ("triton decode", {"scale": -1.0}, ""),
    ("fa4 decode", {"dropout_p": 0.1}, "no dropout; observed 0.1; set attention_dropout=0.0"),
    ("triton", {"dtype": "float32"}, ""),
    ("triton decode", {"head_dim": 36, "dtype": "float32"}, ""),
    ("triton", {"head_dim": 72, "head_dim_v": 256}, ""),
    ("triton", {"head_dim": 8}, ""),
    ("triton", {"heads": 8, "heads_kv": 2, "seqlen_q": "s0", "seqlen_kv": "s1", "batch": "s2"}, ""),
    ("triton decode", {"mask": dense(2, 1, 1, 128)}, ""),
    ("triton", {"mask": dense(2, 1, 128, 128)}, ""),
    ("triton", {"mask": dense(2, 1, 1, 128, dtype="float32")}, ""),
    ("triton", {"changes": CHANGED, "dropout_p": 0.1}, ""),
    ("triton", {"changes": (bias(1, 8, 128, 128),)}, ""),
    ("triton", {"mask": dense(2, 1, 128, 128, dtype="float64")}, "float64"),
    ("triton", {"mask": dense(3, 1, 128, 128)}, "broadcasts"),
    ("triton", {"mask": dense(2, 1, 1, 128), "changes": (bias(1, 8, 128, 128),)}, "one tensor"),
    ("fa4", {"mask": CAUSAL, "seqlen_q": "s0", "seqlen_kv": "s0", "batch": "s1"}, ""),
    ("fa4 cudnn", {"mask": BOTTOM_RIGHT, "seqlen_q": 64, "seqlen_kv": 128}, ""),
    ("fa4", {"mask": BOTTOM_RIGHT, "seqlen_q": "s0", "seqlen_kv": "s1", "heads_kv": 2}, ""),
    ("fa4", {"seqlen_q": 64}, ""),
    ("fa4", {"heads_kv": 2, "mask": window(31, 0)}, ""),
    ("fa4", {"mask": window(31, 31)}, ""),
    ("fa4", {"mask": window(31, None), "changes": CHANGED}, ""),
    ("fa4", {"head_dim": 32}, ""),
    ("fa4 cudnn", {"head_dim": 96, "head_dim_v": 64}, ""),
    ("fa4", {"head_dim": 72, "needs_grad": False}, ""),
    ("fa4", {"head_dim": 8, "needs_grad": False}, ""),
    ("fa4", {"head_dim": 192, "head_dim_v": 128, "heads_kv": 2, "needs_grad": False}, ""),
    ("fa4", {"head_dim": 36}, "head_dim_qk is a multiple of 8; observed 36; pad the heads with zeros to 40"),
    ("fa4", {"head_dim": 96, "head_dim_v": 64, "heads_kv": 2}, "with gradients and fewer heads of k and v, one head_"),
    ("fa4", {"head_dim": 72}, "multiples of 32: dQ is wrong (https://github.com/Dao-AILab/flash-attention/pull/2896)"),
    ("fa4", {"head_dim": 96, "head_dim_v": 80}, "flash-attn-4 4.0.0b36 on sm90, head_dim_qk 96, head_dim_v 80"),
    ("fa4", {"mask": dense(2, 1, 128, 128)}, "a causal one, a window, or none; observed dense bool[2, 1, 128, 128]"),
    ("fa4", {"mask": dense(2, 1, 1, 128)}, "a causal one, a window, or none"),
    ("fa4", {"mask": dense(2, 1, 128, 128, dtype="bfloat16")}, "nothing is added to the scores"),
    ("fa4", {"mask": proved(Causal(), KEPT)}, "a causal one, a window, or none; observed causal"),
    ("fa4", {"mask": proved(IDS)}, "a causal one, a window, or none; observed document"),
    ("fa4", {"changes": (bias(1, 8, 128, 128),)}, "nothing is added to the scores; observed bias[1, 8, 128, 128]"),
    ("fa4", {"mask": CAUSAL, "seqlen_q": 64}, "as many queries as keys, or a mask that is counted from the end"),
    ("fa4", {"mask": CAUSAL, "seqlen_q": "s0"}, "torch._dynamo.mark_static(tensor, dim)"),
    ("fa4", {"mask": window(31, 0), "seqlen_q": 64}, "as many queries as keys"),
    ("fa4", {"mask": window(31, -1)}, "a query may use its own position"),
    ("decode", {"dtype": "float32", "head_dim": 10}, ""),
    ("decode", {"heads": 71, "heads_kv": 1}, ""),
    ("decode", {"seqlen_q": 16, "mask": CAUSAL}, ""),
    ("decode", {"seqlen_kv": "s0 + 1", "batch": "s1"}, ""),
    ("decode", {"mask": dense(2, 8, 1, 128, dtype="bfloat16")}, ""),
    ("decode", {"changes": CHANGED}, ""),
    ("decode", {"needs_grad": True}, "no gradient is needed; observed the output is differentiated; run inference"),
    ("decode", {"seqlen_q": 17}, "seqlen_q is known, and at most 16; observed seqlen_q 17"),
    ("decode", {"seqlen_q": "s0"}, "observed seqlen_q s0"),
    ("decode", {"heads": "s0", "heads_kv": "s0"}, "the numbers of heads are known"),
    ("decode", {"mask": proved(IDS, queries=1)}, "no packed documents; observed document ids[b, q] = ids[b, k]"),
    ("hopper", {"mask": window(512, 512, queries=4096, keys=4096)}, ""),
    ("hopper", {"mask": proved(KEPT, queries=4096, keys=4096)}, ""),
    ("hopper", {"mask": proved(IDS, queries=4096, keys=4096)}, ""),
    ("hopper", {"head_dim": 256, "dtype": "float16"}, ""),
    ("hopper", {"head_dim": 264}, ""),
    ("hopper", {"head_dim": 512}, ""),
    ("hopper", {"head_dim": 264, "changes": (bias(1, 8, 4096, 4096),)}, "head dims are at most 256"),
    ("hopper", {"head_dim": 68}, "8"),
    ("hopper", {"head_dim_v": 68}, "8"),
    ("hopper", {"scale": -1.0}, "positive"),
    ("hopper", {"dropout_p": 0.1}, "no dropout"),
    ("hopper", {"mask": dense(2, 1, 4096, 4096)}, ""),
    ("hopper", {"changes": (bias(1, 8, 4096, 4096),)}, ""),
    ("hopper", {"changes": (bias(1, 8, 1, 4096),)}, "for each pair"),
    ("hopper", {"changes": (bias(1, 8, 4096, 1),)}, "for each pair"),
    ("hopper", {"changes": (bias(1, 8, 4096, 4095),), "seqlen_kv": 4095}, "a multiple of 8 keys"),
    ("hopper", {"changes": (bias(1, 8, 4096, "8*s0"),), "seqlen_kv": "8*s0"}, ""),
    ("hopper", {"changes": (bias(1, 8, 4096, "s0"),), "seqlen_kv": "s0"}, "a multiple of 8 keys"),
    ("hopper", {"changes": (bias(1, 8, 4096, 4096),), "scale": 1e-7}, "beside a bias"),
    ("hopper", {"scale": 1e-40}, "scale is at least"),
    ("hopper", {"changes": (Softcap(cap=1e35),)}, "softcap is at most"),
    ("hopper_fp8", {}, ""),
    ("hopper_fp8", {"changes": (Softcap(cap=30.0), Sinks(requires_grad=False))}, ""),
    ("hopper_fp8", {"head_dim": 16}, ""),
    ("hopper_fp8", {"head_dim": 192}, "128"),
    ("hopper_fp8", {"mask": dense(1, 1, 4096, 4096)}, "mask"),
    ("hopper_fp8", {"changes": (bias(1, 8, 4096, 4096),)}, "bias"),
    ("hopper_fp8", {"scale": -0.1}, "scale"),
    ("hopper_fp8", {"dropout_p": 0.1}, "seed"),
    ("cudnn", {"mask": CAUSAL}, ""),
    ("cudnn", {"mask": CAUSAL, "changes": (Sinks(requires_grad=False),)}, ""),
    ("cudnn", {"mask": window(40)}, ""),
    ("cudnn", {"mask": window(40, 7)}, ""),
    ("cudnn", {"changes": (Sinks(requires_grad=True),)}, ""),
    ("cudnn", {"changes": (bias(1, 8, 128, 128),)}, ""),
    ("cudnn", {"mask": dense(2, 1, 128, 128, dtype="bfloat16")}, ""),
    ("cudnn", {"seqlen_q": 192, "seqlen_kv": 192}, ""),
    ("cudnn", {"heads": 16, "heads_kv": 1}, ""),
    ("cudnn", {"dtype": "float16", "head_dim": 256, "head_dim_v": 8}, ""),
    ("cudnn", {"dropout_p": 0.125, "changes": (bias(1, 8, 128, 128),)}, ""),
    ("cudnn", {"seqlen_q": 1, "needs_grad": False}, ""),
    ("cudnn", {"changes": (Softcap(cap=50.0),)}, "no softcap"),
    ("cudnn", {"mask": dense(1, 1, 128, 128)}, "a mask tensor of truth values"),
    ("cudnn", {"dropout_p": 0.1}, "dropout is a multiple of 1/16"),
    ("cudnn", {"mask": BOTTOM_RIGHT, "seqlen_q": 256}, "no more queries than keys"),
    ("cudnn", {"mask": window(40, queries=256), "seqlen_q": 256}, "no more queries than keys"),
    ("cudnn", {"mask": BOTTOM_RIGHT, "seqlen_kv": 256, "changes": (bias(1, 8, 128, 256),)}, "bottom right, no bias"),
    ("cudnn", {"mask": BOTTOM_RIGHT, "seqlen_kv": 256, "dropout_p": 0.125}, "no lengths and no dropout"),
    ("cudnn", {"mask": proved(CausalFrom(offset=Const(-1)))}, "at its own position; observed strictly causal"),
    ("cudnn", {"changes": (Sinks(requires_grad=False),), "seqlen_q": 1, "needs_grad": False}, "more than one query"),
    ("cudnn", {"mask": dense(1, 1, 128, 128, dtype="float32")}, "the mask is bool or bfloat16"),
    ("cudnn", {"mask": dense(2, 1, 1, 128, dtype="bfloat16")}, "a bias has a row for each query"),
    ("cudnn", {"mask": dense(128, dtype="bfloat16")}, "a bias has a row for each query"),
    *(
        ("cudnn", {"batch": "s0"} if name == "batch" else {"seqlen_q": "s0", "seqlen_kv": "s0"}, said)
        for name in ("batch", "lengths")
        for said in ("every size and stride is known: a plan serves one shape", "observed q (", "with dynamic=False")
    ),
    ("cudnn", {**MANY, "mask": CAUSAL}, ""),
    ("cudnn", {**MANY, "seqlen_q": 4096, "seqlen_kv": 4096, "changes": (bias(1, 32, 4096, 4096),)}, "a bias with grad"),
    *(
        ("cudnn", {**MANY, "seqlen_q": 4096, "seqlen_kv": 4096, "changes": (added,)}, "")
        for added in (bias(1, 32, 4096, 4096, requires_grad=False),)
    ),
]


def _asked(family: str, given: dict[str, Any]) -> AttentionSpec:
    sizes, made = FAMILIES[family]
    return made(make_spec(**{**sizes, **given}))


@pytest.mark.parametrize(
    ("family", "given", "said"),
    [(family, given, said) for families, given, said in SITES for family in families.split()],
    ids=str,
)
def test_what_it_takes(family: str, given: dict[str, Any], said: str) -> None:
    reasons = words(by_name(family).why_not(_asked(family, given), H200))
    assert said in reasons
    assert bool(reasons) is bool(said)


#: the same on other machines
ELSEWHERE: list[tuple[str, dict[str, Any], Target, str]] = [
    ("fa4", {}, B200, ""),
    ("fa4", {"head_dim": 192, "head_dim_v": 128}, B200, ""),
    ("fa4", {"head_dim": 160}, B200, "head dims are at most 128, or (192, 128), or (256, 256)"),
    ("fa4", {"head_dim": 256, "needs_grad": False}, B200, ""),
    ("fa4", {"head_dim": 256}, B200, "with gradients, head dims are at most 192"),
    ("triton", {"device": "cpu", "dtype": "float32"}, INTERPRETED, ""),
    ("triton", {"device": "cpu", "dtype": "float16"}, INTERPRETED, ""),
    ("triton", {"device": "cpu"}, INTERPRETED, "interpreter computes in float16 or float32; observed bfloat16"),
    *(
        ("triton", {"head_dim": 256, "dtype": "float32", "needs_grad": False}, Target.fake(sm=sm), said)
        for sm, said in ((80, ""), (86, "in float32"), (89, "in float32"), (90, ""), (100, ""), (120, "in float32"))
    ),
    *(("triton", {"head_dim": 512, "dtype": "float32"}, Target.fake(sm=sm), "in float32") for sm in (80, 86, 90, 120)),
    *(("triton", {"head_dim": wide}, Target.fake(sm=sm), "") for wide in (128, 256, 512) for sm in (80, 86, 90, 120)),
    (
        "cudnn",
        {**MANY, "mask": CAUSAL},
        dataclasses.replace(H200, deterministic=True),
        "a deterministic backward takes at most 2048 MiB for all scores; observed 2112 MiB",
    ),
    ("cudnn", {**MANY, "seqlen_q": 2048}, dataclasses.replace(H200, deterministic=True), ""),
    ("cudnn", {**MANY, "needs_grad": False}, dataclasses.replace(H200, deterministic=True), ""),
]


@pytest.mark.parametrize(("family", "given", "machine", "said"), ELSEWHERE, ids=str)
def test_what_it_takes_elsewhere(family: str, given: dict[str, Any], machine: Target, said: str) -> None:
    reasons = words(by_name(family).why_not(_asked(family, given), machine))
    assert said in reasons
    assert bool(reasons) is bool(said)


@pytest.mark.parametrize(
    ("given", "target"),
    [
        *(({**LONG, **given}, H200) for given in ({"dtype": "float32"}, {"scale": -1.0}, {"dropout_p": 0.1})),
        *((LONG, Target.fake(sm=sm)) for sm in (80, 100)),
    ],
)
def test_what_hoppers_kernels_leave_our_triton_kernels_take(given: dict[str, Any], target: Target) -> None:
    assert words(by_name("hopper").why_not(make_spec(**given), target)) != ""
    assert words(by_name("triton").why_not(make_spec(**given), target)) == ""


@pytest.mark.parametrize(
    ("takes", "given", "beyond"),
    [
        (hopper.TAKES, {"mask": proved(IDS, queries=4096, keys=4096)} | LONG, set()),
        (hopper.TAKES, {"mask": proved(KEPT, queries=4096, keys=4096)} | LONG, set()),
        (cudnn.TAKES, {"changes": (bias(1, 8, 128, 128),)}, set()),
        (fa4.TAKES, {"changes": (bias(1, 8, 128, 128),)}, {"bias"}),
    ],
)
def test_parts_that_are_left_to_the_models_own_tensor(takes: Takes, given: dict[str, Any], beyond: set[str]) -> None:
    assert takes.beyond(make_spec(**given)) == beyond


#: Takes that are a part of others'
LESS: list[tuple[Takes, Takes]] = [
    (decode.TAKES, kernel_limits.TAKES),
    (decode.OF_LATENT, kernel_limits.TAKES),
    (hopper.TAKES, kernel_limits.TAKES),
    (hopper.FP8, hopper.TAKES),
]


@pytest.mark.parametrize(("less", "more"), LESS)
def test_each_takes_a_part_of_what_another_does(less: Takes, more: Takes) -> None:
    assert set(less.dtypes) <= set(more.dtypes)
    assert set(less.changes) <= set(more.changes)
    assert less.parts <= more.parts <= MASKING | ADDED
    if less.head_dims is not None and more.head_dims is not None:
        assert (less.head_dims.most or 0) <= (more.head_dims.most or 0)
        assert less.head_dims.multiple % more.head_dims.multiple == 0
    for sm in (75, 80, 86, 89, 90, 100, 120):
        assert check_gpu(less, Target.fake(sm=sm)) or not check_gpu(more, Target.fake(sm=sm))


def test_what_decoding_leaves_out() -> None:
    assert kernel_limits.TAKES.parts - decode.TAKES.parts == {"documents"}
    assert decode.OF_LATENT.parts & (ADDED | {"documents"}) == {"bias"}
    for takes in (decode.TAKES, decode.OF_LATENT):
        served = {"mask": CAUSAL, "changes": (Softcap(cap=30.0), Sinks(requires_grad=False))}
        assert refused(takes, make_spec(needs_grad=False, **served)) == []
        assert not takes.gradients
        assert not takes.dropout
