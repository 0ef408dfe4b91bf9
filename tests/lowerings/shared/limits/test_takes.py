"""What a family takes, as data: the difference to a site is what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.cudnn.takes import TAKES as CUDNN
from attn_compiler.lowerings.decode.takes import TAKES as DECODE
from attn_compiler.lowerings.fa4.takes import TAKES as FA4
from attn_compiler.lowerings.hopper.takes import FP8 as HOPPER_FP8, TAKES as HOPPER
from attn_compiler.lowerings.plain import takes as plain
from attn_compiler.lowerings.sdpa import takes as sdpa
from attn_compiler.lowerings.shared.limits import common as limits, kernel_limits, takes
from attn_compiler.lowerings.shared.limits.takes import OWN, HeadDims, Takes, since
from attn_compiler.lowerings.shared.parts.site_parts import ADDED, MASKING, PartKind
from attn_compiler.spec.masks import Causal, Dense, Document, KeyPadding, MaskSpec
from attn_compiler.spec.scores import Sinks, Softcap, Unusual
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec, words

FAMILIES: dict[str, Takes] = {
    "math": plain.MATH,
    "reference": plain.REFERENCE,
    "sdpa_cudnn": takes.CUDNN,
    "sdpa_flash": sdpa.FLASH,
    "sdpa_efficient": sdpa.EFFICIENT,
    "sdpa_efficient before sm80": sdpa.EFFICIENT_BEFORE_SM80,
    "sdpa_cpu_flash": sdpa.CPU_FLASH,
    "triton": kernel_limits.TAKES,
    "decode": DECODE,
    "cudnn": CUDNN,
    "fa4": FA4,
    "hopper_fp8": HOPPER_FP8,
    "hopper": HOPPER,
}
ALL = Takes(
    sms=None,
    dtypes=("bfloat16",),
    changes=(Softcap, Sinks),
    scales="any",
    any_shape=True,
    many_blocks=True,
    float64_softmax=True,
    lse="differentiated",
)
SOFTCAP, SINKS = Softcap(cap=30.0), Sinks(requires_grad=False)


def said(taken: Takes, **spec: Any) -> str:
    return words(takes.refused(taken, make_spec(**spec)))


@pytest.mark.parametrize(
    ("less", "spec", "rule"),
    [
        ({"changes": (Sinks,)}, {"changes": (SOFTCAP,)}, "no softcap; observed"),
        ({"changes": (Softcap,)}, {"changes": (SINKS,)}, "no attention sinks"),
        ({"scales": "moderate"}, {"scale": -1e4}, "the scale is at most 256"),
        ({"scales": "positive"}, {"scale": -1.0}, "the scale is positive"),
        ({"float64_softmax": False}, {"softmax_dtype": "float64"}, "the softmax runs in at most float32"),
        ({"any_shape": False}, {"seqlen_kv": 0}, "no axis can be empty"),
        ({"dtypes": ("float16", "float32")}, {}, "q is float16 or float32; observed bfloat16"),
        ({"head_dims": HeadDims(multiple=48, in_full=1)}, {}, "head_dim_qk is a multiple of 48"),
        ({"head_dims": HeadDims(multiple=8, in_full=1, most=32)}, {}, "head_dim_qk is at most 32"),
        ({"unequal_head_dims": False}, {"head_dim_v": 32}, "q, k and v have one head_dim"),
        ({"many_blocks": False}, {"batch": 70_000}, "batch and heads are at most 65535"),
        ({"gradients": False}, {}, "no gradient is needed"),
        ({"lse": "unread"}, {"lse": "read"}, "nothing reads the logsumexp of the scores; observed it is read"),
        ({"lse": "unread"}, {"lse": "differentiated"}, "nothing reads the logsumexp"),
        ({"lse": "read"}, {"lse": "differentiated"}, "the logsumexp of the scores has no gradient"),
        ({"lse": "read"}, {"lse": "merged"}, "the logsumexp of the scores has no gradient; observed it is merged"),
        ({"dropout": False}, {"dropout_p": 0.25}, "no dropout; observed 0.25"),
        ({"symbolic_sizes": False}, {"seqlen_kv": "s0"}, "every size and stride is known"),
        ({"tensors": ()}, {"mask": dense(1, 1, 128, 128)}, "no mask tensor"),
        ({"tensors": (OWN,)}, {"mask": dense(1, 1, 128, 128, dtype="float16")}, "the mask is bool or bfloat16"),
    ],
)
def test_what_is_not_taken_is_refused(less: dict[str, Any], spec: dict[str, Any], rule: str) -> None:
    taken = dataclasses.replace(ALL, **less)
    assert said(ALL, **spec) == ""
    assert rule in said(taken, **spec)
    # One field, one reason: of head dims one for each of both.
    reasons = takes.refused(taken, make_spec(**spec))
    assert len({reason.rule.replace("head_dim_v", "head_dim_qk") for reason in reasons}) == 1


def test_each_score_is_changed_once_at_most() -> None:
    assert "changed once by itself; observed softcap 30, softcap 20" in said(ALL, changes=(SOFTCAP, Softcap(cap=20.0)))


def test_head_dims_of_wider_dtypes_have_multiples_of_their_own() -> None:
    taken = dataclasses.replace(ALL, dtypes=("float32", "bfloat16"), head_dims=HeadDims(multiple=8, in_full=4))
    assert said(taken, head_dim=36, dtype="float32") == ""
    assert "multiple of 8" in said(taken, head_dim=36)


def test_a_change_without_a_kind_is_taken_by_nobody() -> None:
    for name, taken in FAMILIES.items():
        assert "score changes that this kernel applies" in said(taken, changes=(Unusual(what="a step"),)), name


def test_a_bias_is_no_change_but_a_part_or_a_tensor() -> None:
    assert said(dataclasses.replace(ALL, changes=()), changes=(bias(1, 8, 128, 128),)) == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dtype_is_one_word(name: str) -> None:
    taken = FAMILIES[name]
    spec = make_spec(dtype="float8_e4m3fn", needs_grad=False, head_dim=64)
    assert "observed float8_e4m3fn" in words(takes.refused(taken, spec))
    more = dataclasses.replace(taken, dtypes=(*taken.dtypes, "float8_e4m3fn"))
    assert "observed float8_e4m3fn" not in words(takes.refused(more, spec))


@pytest.mark.parametrize(
    ("sms", "sm", "rule"),
    [
        (since(80), 80, ""),
        (since(80), limits.LAST_SM, ""),
        (since(80), 75, f"GPU architecture from sm80 to sm{limits.LAST_SM}; observed sm75"),
        (since(80), limits.LAST_SM + 1, "GPU architecture from sm80"),
        (((90, 90), (100, 109)), 90, ""),
        (((90, 90), (100, 109)), 103, ""),
        (((90, 90), (100, 109)), 95, "GPU architecture sm90 or sm100 to sm109; observed sm95"),
        (((90, 90), (100, 109)), 120, "GPU architecture sm90 or sm100 to sm109; observed sm120"),
        (None, 0, ""),
    ],
)
def test_architectures_are_ranges(sms: Any, sm: int, rule: str) -> None:
    found = words(takes.check_gpu(dataclasses.replace(ALL, sms=sms), Target.fake(sm=sm)))
    assert rule in found
    assert bool(found) == bool(rule)


def test_our_own_kernels_and_plain_products_give_the_logsumexp() -> None:
    given = {name: taken.lse for name, taken in FAMILIES.items() if taken.lse != "unread"}
    differentiated = dict.fromkeys(("math", "reference", "triton", "hopper"), "differentiated")
    assert given == {**differentiated, "decode": "read"}
    assert said(DECODE, lse="read", needs_grad=False) == ""


def test_the_cpu_is_no_gpu() -> None:
    cpu = Target.fake(device="cpu")
    assert takes.check_gpu(ALL, cpu) == []
    assert "runs on an NVIDIA GPU" in words(takes.check_gpu(kernel_limits.TAKES, cpu))


@pytest.mark.parametrize("taken", FAMILIES.values(), ids=FAMILIES)
def test_what_families_say_is_well_formed(taken: Takes) -> None:
    known = {"bfloat16", "float16", "float32", "float64"}
    assert set(taken.dtypes) <= known
    assert set(taken.tensors or ()) <= known | {OWN}
    assert taken.parts <= MASKING | ADDED == set(get_args(PartKind))
    for first, last in taken.sms or ():
        assert 50 <= first <= last <= limits.LAST_SM
    assert list(taken.sms or ()) == sorted(taken.sms or ())


def test_parts_beyond_what_is_taken() -> None:
    kept = KeyPadding(condition=ix.as_bool(Load("mask", (Index("b"), Index("k")), "int")))
    ids = Document(of_key=Load("ids", (Index("b"), Index("k")), "int"))
    tensor = Dense(shape=(2, 1, 128, 128), dtype="bool")
    spec = make_spec(mask=MaskSpec(kinds=(Causal(), kept, ids), dense=tensor))
    assert FA4.beyond(spec) == {"keys", "documents"}
    assert CUDNN.beyond(spec) == {"keys", "documents"}
    assert DECODE.beyond(spec) == {"documents"}
    assert kernel_limits.TAKES.beyond(spec) == set()
    assert FA4.beyond(make_spec(mask=CAUSAL)) == set()
