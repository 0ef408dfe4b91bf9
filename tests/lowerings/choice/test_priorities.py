from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler.lowerings import LOWERINGS, by_name, order
from attn_compiler.lowerings.base import FP8
from attn_compiler.lowerings.choice import priorities
from attn_compiler.spec.attention import Dim, StoredSpec, TensorSpec
from attn_compiler.spec.masks import Dense, MaskSpec
from attn_compiler.spec.target import Target
from tests import cases
from tests.cases import BY_NAME
from tests.lowerings.specs import CAUSAL, dense, make_spec

SPEC = cases.build(BY_NAME["causal_bfloat16"]).spec

CUDNN_FIRST = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "untouched")
FLASH_FIRST = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "untouched")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target.fake(sm=90), CUDNN_FIRST),
        (Target.fake(sm=100), CUDNN_FIRST),
        (Target.fake(sm=103), CUDNN_FIRST),
        (Target.fake(sm=90, cudnn=91501), CUDNN_FIRST),
        (Target.fake(sm=90, cudnn=91500), FLASH_FIRST),
        (Target.fake(sm=100, cudnn=91000), FLASH_FIRST),
        (Target.fake(sm=80), FLASH_FIRST),
        (Target.fake(sm=86), FLASH_FIRST),
        (Target.fake(sm=89), FLASH_FIRST),
        (Target.fake(sm=120), FLASH_FIRST),
        (Target.fake(sm=75), ("sdpa_efficient", "untouched")),
        (Target.fake(sm=0, cudnn=0), ("untouched",)),
        (Target.fake(sm=200), ("untouched",)),
    ],
    ids=lambda value: value.words if isinstance(value, Target) else None,
)
def test_order(target: Target, expected: tuple[str, ...]) -> None:
    assert order(SPEC, target) == expected


@pytest.mark.parametrize(
    ("sm", "seqlen_q", "seqlen_kv", "tensor", "place"),
    [
        (90, 4096, 4096, True, "first"),
        (90, 512, 512, True, "first"),
        (90, 511, 512, True, None),
        (90, 1, 1 << 20, True, None),
        (90, "s0", "s0", True, "first"),
        (90, "s0", "s0", False, "later"),
        (90, "s0", 32, True, None),
        (90, 4096, 4096, False, "later"),
        (90, 512, 512, False, "later"),
        (90, 511, 512, False, None),
        (80, 4096, 4096, True, "first"),
        (89, "s0", "s0", True, "first"),
        (120, 512, 512, True, "first"),
        (120, 511, 512, True, None),
        (89, 4096, 4096, False, "later"),
        (80, 512, 4096, False, "later"),
        (80, 1, 1 << 20, False, None),
        (100, 4096, 4096, True, "later"),
        (100, 4096, 4096, False, "later"),
        (100, 511, 512, False, None),
        (75, 4096, 4096, True, None),
    ],
)
def test_our_kernels_come_where_there_is_work_for_them(
    sm: int, seqlen_q: Dim, seqlen_kv: Dim, tensor: bool, place: str | None
) -> None:
    """With gradients and without."""
    mask = MaskSpec(dense=Dense(shape=(2, 1, seqlen_q, seqlen_kv), dtype="bool")) if tensor else MaskSpec()
    spec = dataclasses.replace(make_spec(dtype="bfloat16", seqlen_q=seqlen_q, seqlen_kv=seqlen_kv), mask=mask)
    for needs_grad in (False, True):
        found = order(dataclasses.replace(spec, needs_grad=needs_grad), Target.fake(sm=sm))
        # Hopper's own kernel does not take a dense mask.
        asked = [name for name in found if name != "hopper"]
        assert (("first" if asked[0] == "triton" else "later") if "triton" in found else None) == place
    dropped = dataclasses.replace(spec, score=dataclasses.replace(spec.score, dropout_p=0.1))
    # On sm90 cuDNN may stand before ours, and takes no dropout of 0.1.
    asked = [name for name in order(dropped, Target.fake(sm=sm)) if name != "sdpa_cudnn" or sm != 90]
    assert (asked[0] in ("hopper", "triton")) == (place == "first")
    assert order(dropped, Target.fake(sm=sm))[0] != "hopper"


def test_scores_in_float32_beside_halves_stay_the_models_own() -> None:
    """GPT-J in training: float32 kernels take twice as long as what Inductor makes of it."""
    spec = dataclasses.replace(make_spec(dtype="float32"), decomposed=True, needs_grad=True)
    narrow = dataclasses.replace(spec, out_dtype="bfloat16")
    assert order(narrow, Target.fake(sm=90)) == ("untouched",)
    assert order(dataclasses.replace(narrow, decomposed=False), Target.fake(sm=90))[0] != "untouched"
    assert order(spec, Target.fake(sm=90))[0] != "untouched"


def test_a_measured_row_counts_where_head_dims_are_known() -> None:
    target = Target.fake(flash_attn_4="4.0.0b36")
    known = make_spec(mask=CAUSAL, seqlen_q=8192, seqlen_kv=8192, head_dim=128)
    row = priorities.row_of(known, target)
    assert row is not None
    assert (row.mask, row.head_dims, row.seqlens, row.training) == ("causal", (97, 128), (4096, 16383), True)
    assert order(known, target)[0] == "fa4"
    assert order(make_spec(mask=CAUSAL, seqlen_q=8192, seqlen_kv=8192, head_dim="s0"), target)[0] == "sdpa_cudnn"
    # A length that is not known counts as 4096.
    for unknown in ({"seqlen_q": "s0", "seqlen_kv": "s0"}, {"seqlen_q": 8192, "seqlen_kv": "s0"}):
        assert priorities.row_of(make_spec(mask=CAUSAL, head_dim=128, **unknown), target) == row  # type: ignore[arg-type]
    assert order(make_spec(mask=CAUSAL, seqlen_q=8192, seqlen_kv=8192, batch="s0"), target)[0] == "fa4"
    assert (
        order(dataclasses.replace(known, score=dataclasses.replace(known.score, dropout_p=0.1)), target)[0]
        == "sdpa_cudnn"
    )
    assert order(make_spec(mask=CAUSAL, seqlen_q=1, seqlen_kv=8192), target)[0] == "sdpa_cudnn"


def test_no_machine_but_the_measured_one_takes_its_rows() -> None:
    known = make_spec(mask=CAUSAL, seqlen_q=8192, seqlen_kv=8192, head_dim=128)
    for target in (Target.fake(sm=100), Target.fake(sm=80), Target.fake(cudnn=91500)):
        row = priorities.row_of(known, target)
        assert row is not None
        assert row.mask is None


_CACHE = TensorSpec(shape=(2, 8, 4096, 64), strides=(2097152, 262144, 64, 1), dtype="float8_e4m3fn")
IN_FP8 = StoredSpec(k=_CACHE, v=_CACHE)


@pytest.mark.parametrize(
    ("machine", "spec", "place"),
    [
        ({"sm": 90}, {"mask": dense(2, 1, 1, 4096)}, 0),
        ({"sm": 90}, {"seqlen_q": 16, "dtype": "float16", "mask": dense(2, 1, 16, 4096)}, 0),
        ({"sm": 90}, {"seqlen_kv": "s0", "batch": "s1", "mask": dense("s1", 1, 1, "s0")}, 0),
        ({"sm": 90}, {}, 3),
        ({"sm": 90}, {"head_dim": 256}, 0),
        ({"sm": 90}, {"head_dim": 256, "seqlen_q": 16}, 3),
        ({"sm": 90}, {"seqlen_q": 17, "mask": dense(2, 1, 17, 4096)}, None),
        ({"sm": 90}, {"seqlen_q": "s0", "mask": dense(2, 1, "s0", 4096)}, None),
        ({"sm": 90}, {"needs_grad": True, "mask": dense(2, 1, 1, 4096)}, None),
        ({"sm": 90}, {"dtype": "float32", "mask": dense(2, 1, 1, 4096)}, None),
        ({"sm": 80}, {"mask": dense(2, 1, 1, 4096)}, 0),
        ({"sm": 100}, {"mask": dense(2, 1, 1, 4096)}, 0),
        ({"sm": 120}, {"mask": dense(2, 1, 1, 4096)}, 0),
        ({"sm": 90, "cudnn": 91000}, {"mask": dense(2, 1, 1, 4096)}, 0),
        ({"sm": 80}, {}, 3),
        ({"sm": 100}, {}, None),
        ({"sm": 75}, {"mask": dense(2, 1, 1, 4096)}, None),
        ({"sm": 90}, {"stored": IN_FP8}, 0),
        ({"sm": 120}, {"stored": IN_FP8}, 0),
        ({"sm": 80}, {"stored": IN_FP8}, 3),
    ],
    ids=str,
)
def test_decode_comes_where_few_queries_read_a_cache(
    machine: dict[str, int], spec: dict[str, Any], place: int | None
) -> None:
    made = make_spec(
        **{"seqlen_q": 1, "seqlen_kv": 4096, "needs_grad": False, **{k: v for k, v in spec.items() if k != "stored"}}
    )
    made = dataclasses.replace(made, stored=spec.get("stored"))
    found = order(made, Target.fake(**machine))  # type: ignore[arg-type]
    assert (found.index("decode") if "decode" in found else None) == place


CPU = Target.fake(device="cpu")
FLASH, MATH, NOTHING = ("sdpa_cpu_flash", "untouched"), ("math", "sdpa_cpu_flash", "untouched"), ("untouched",)
FLASH_OR_MATH = ("sdpa_cpu_flash", "math", "untouched")


@pytest.mark.parametrize(
    ("dtype", "training", "seqlen_q", "seqlen_kv", "of_sdpa", "of_products"),
    [
        ("float32", False, 24, 24, FLASH, FLASH),
        ("float32", False, 1, 512, FLASH, NOTHING),
        ("float32", False, "s0", "s0", FLASH, FLASH),
        ("float32", True, 128, 128, FLASH, NOTHING),
        ("float32", True, 512, 512, FLASH, FLASH),
        ("float32", True, "s0", "s0", FLASH, FLASH),
        ("float64", False, 24, 24, FLASH, FLASH),
        ("bfloat16", False, 24, 24, FLASH_OR_MATH, NOTHING),
        ("bfloat16", False, 1, 4096, MATH, NOTHING),
        ("float16", False, 1, 512, MATH, NOTHING),
        ("bfloat16", False, 1024, 1024, FLASH_OR_MATH, NOTHING),
        ("bfloat16", False, 2048, 2048, FLASH, FLASH),
        ("bfloat16", False, 16384, 16384, FLASH, FLASH),
        ("bfloat16", False, "s0", "s0", FLASH, NOTHING),
        ("float16", True, 512, 512, MATH, NOTHING),
        ("float16", True, 1024, 1024, FLASH, FLASH),
        ("float16", True, 512, "s0", FLASH, NOTHING),
    ],
)
def test_order_on_the_cpu(
    dtype: str, training: bool, seqlen_q: Dim, seqlen_kv: Dim, of_sdpa: tuple[str, ...], of_products: tuple[str, ...]
) -> None:
    spec = make_spec(dtype=dtype, needs_grad=training, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, device="cpu")
    assert order(spec, CPU) == of_sdpa
    assert order(dataclasses.replace(spec, decomposed=True), CPU) == of_products


@pytest.mark.parametrize(
    ("dtype", "training", "length", "padded", "causal"),
    [
        ("bfloat16", True, 160, MATH, MATH),
        ("bfloat16", True, 161, FLASH_OR_MATH, MATH),
        ("bfloat16", True, 256, FLASH_OR_MATH, MATH),
        ("bfloat16", True, 257, FLASH_OR_MATH, FLASH_OR_MATH),
        ("bfloat16", True, 512, FLASH_OR_MATH, FLASH_OR_MATH),
        ("bfloat16", True, 513, FLASH, FLASH),
        ("bfloat16", True, "s0", FLASH, FLASH),
        ("float16", True, 512, MATH, MATH),
        ("bfloat16", False, 512, FLASH_OR_MATH, FLASH_OR_MATH),
    ],
)
def test_bfloat16_trains_by_flash_from_where_avx512_makes_it_faster(
    dtype: str, training: bool, length: Dim, padded: tuple[str, ...], causal: tuple[str, ...]
) -> None:
    """Without AVX-512 math is faster up to 512."""
    given: dict[str, Any] = {"dtype": dtype, "needs_grad": training, "seqlen_q": length, "seqlen_kv": length}
    for mask, expected in ((dense(2, 1, 1, length), padded), (CAUSAL, causal), (MaskSpec(), causal)):
        spec = make_spec(device="cpu", mask=mask, **given)
        assert order(spec, Target.fake(device="cpu", avx512=True)) == expected
        assert order(spec, CPU) == (MATH if expected == FLASH_OR_MATH and training else expected)


def test_where_a_logsumexp_is_read_those_that_give_it_come_before_what_is_left() -> None:
    for target in (Target.fake(sm=100), Target.fake(sm=75), Target.fake(device="cpu"), Target.fake(sm=200)):
        usual = order(make_spec(device=target.device), target)
        found = order(make_spec(device=target.device, lse="merged"), target)
        assert found[: len(usual) - 1] == usual[:-1]
        assert set(found[len(usual) - 1 :]) == {"decode", "hopper", "triton", "math", "untouched"} - set(usual[:-1])
        assert found[-1] == "untouched"


@pytest.mark.parametrize("sm", [75, 80, 90, 100])
def test_the_spelling_changes_nothing_on_a_gpu(sm: int) -> None:
    target = Target.fake(sm=sm)
    assert order(SPEC, target) == order(dataclasses.replace(SPEC, decomposed=True), target)


def test_rows_name_lowerings_and_their_evidence() -> None:
    names = {lowering.name for lowering in LOWERINGS}
    for row in priorities.ROWS:
        assert set(row.order) < names - {"reference", "untouched", *FP8}
        assert len(set(row.order)) == len(row.order)
        assert row.why
        assert row.since


def test_lowerings_are_registered_once_each() -> None:
    assert [lowering.name for lowering in LOWERINGS] == [
        "reference",
        "reference_fp8",
        "sdpa_cudnn",
        "sdpa_flash",
        "sdpa_efficient",
        "sdpa_cpu_flash",
        "rows",
        "fa4",
        "hopper",
        "triton",
        "hopper_fp8",
        "cudnn",
        "cudnn_fp8",
        "decode",
        "decode_latent",
        "math",
        "absorbed",
        "untouched",
    ]
    with pytest.raises(KeyError, match="no lowering 'fa9'; there are reference, reference_fp8, sdpa_cudnn"):
        by_name("fa9")


def test_every_lowering_keeps_the_contract() -> None:
    for lowering in LOWERINGS:
        assert by_name(lowering.name) is lowering
        for method in ("unavailable", "why_not", "demand", "emit"):
            assert callable(getattr(lowering, method))
