"""What PyTorch's kernels can't do with masks and biases."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.lowerings.shared.limits import mask_limits
from attn_compiler.passes.writing import keyless_nodes
from attn_compiler.spec.added_scores import Bias, BiasFormula, Penalty, ProvedScore, RegionPenalty
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Causal, CausalFrom, Dense, Flag, KeyPadding, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import ScoreSpec, Softcap
from tests.lowerings.shared.limits.test_common import ALL, SPEC, takes, why_not
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, bias, dense, make_spec
from tests.passes.compiling import compiled


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
    assert not mask_limits.causal_flag(spec)
    assert mask_limits.causal_flag(make_spec(mask=BOTTOM_RIGHT))
    assert mask_limits.causal_flag(make_spec(seqlen_q=1, seqlen_kv=512, mask=CAUSAL))
    assert not mask_limits.causal_flag(make_spec())


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


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient", "sdpa_cpu_flash"])
@pytest.mark.parametrize("shape", [(2, 8, 128, 128), (1, 1, 1, 128), (2, 1, 1, 1), (128, 128), (128,), (8, 1, 128)])
def test_mask_shapes(name: str, shape: tuple[int, ...]) -> None:
    assert takes(name, mask=dense(*shape), needs_grad=False)
    assert takes(name, mask=dense(*shape, dtype="bfloat16"), needs_grad=False)


def test_flash_reads_no_mask_tensor() -> None:
    reasons = why_not("sdpa_flash", make_spec(mask=dense(1, 1, 128, 128)))
    assert "no mask tensor; observed dense bool[1, 1, 128, 128]; make the mask inside" in reasons


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
        assert f"observed {mask_dtype}; cast the mask to {dtype}, unless rounding" in why_not(name, spec)


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


def test_a_kind_that_neither_a_flag_nor_a_tensor_says_is_refused() -> None:
    window = MaskSpec(kinds=(Causal(), SlidingWindow(left=7, right=None)), flag=Flag.CALLED)
    (reason,) = mask_limits.check_masks(make_spec(mask=window))
    assert reason.observed == "window (7 back)"
    tensor = dataclasses.replace(window, dense=Dense(shape=(2, 1, 128, 128), dtype="bool"))
    assert mask_limits.check_masks(make_spec(mask=tensor)) == []
    assert mask_limits.check_masks(make_spec(mask=window, changes=(bias(1, 8, 128, 128),))) == []


PADDING = KeyPadding(condition=Load("real", (Index("b"), Index("k")), "bool"))


NUMBERS = Dense(shape=(2, 1, 128, 128), dtype="float32")


GIVEN = MaskSpec(dense=NUMBERS, reason="mask is an input of the graph: it may mask too")


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"mask": MaskSpec(dense=NUMBERS, kinds=(Causal(), PADDING))}, False),
        ({"mask": MaskSpec(dense=NUMBERS, kinds=(CausalFrom(offset=Const(-1)),))}, False),
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
    refusals = str(run.site.decision.refusals)
    # Those of what was read are completed behind the kernel.
    assert ("leave each query some key" in refusals) == (how == "given")
    assert (keyless_nodes.NOTE in run.site.notes) == (how == "made")


MASK = Load("mask", (Index("k"),), "float")


LATER = ix.compare(">", Index("k"), Index("q"))


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
    reasons = mask_limits.check_tensor(spec, dtypes=("float32",))
    assert [reason.observed for reason in reasons] == ([kind.words] if large else [])
    assert all(reason.remedy for reason in reasons)
    assert mask_limits.check_tensor(dataclasses.replace(spec, needs_grad=False), dtypes=("float32",)) == []
    assert mask_limits.check_tensor(_in(spec, "float64"), dtypes=("float32",)) == []


@pytest.mark.parametrize(("cap", "refused"), [(50.0, False), (3000.0, True)])
def test_an_lse_holds_no_large_softcap(cap: float, refused: bool) -> None:
    spec = dataclasses.replace(SPEC, score=ScoreSpec(scale=0.5, changes=(Softcap(cap=cap),)))
    assert [x.observed for x in mask_limits.check_no_large_numbers(spec)] == (["softcap 3000"] if refused else [])
    assert not mask_limits.check_no_large_numbers(dataclasses.replace(spec, needs_grad=False))


def test_half_precision_asks_for_fewer_digits() -> None:
    spec = dataclasses.replace(SPEC, score=ScoreSpec(scale=0.5, proved=(Penalty(value=30000.0, condition=LATER),)))
    assert mask_limits.check_tensor(spec, dtypes=("float32",))
    assert mask_limits.check_tensor(_in(spec, "bfloat16"), dtypes=("float32",)) == []


def _in(spec: AttentionSpec, dtype: str) -> AttentionSpec:
    return dataclasses.replace(spec, **{name: dataclasses.replace(spec.q, dtype=dtype) for name in "qkv"})


@pytest.mark.parametrize(
    ("rows", "needs_grad", "left"),
    [
        (None, True, ["math", "reference", "sdpa_cpu_flash", "rows", "untouched"]),
        ("numbers", True, ["math", "reference", "untouched"]),
        ("numbers", False, ["math", "reference", "sdpa_cpu_flash", "untouched"]),
        ("model", False, ["untouched"]),
    ],
)
def test_rows_that_only_the_models_numbers_give(rows: Any, needs_grad: bool, left: list[str]) -> None:
    spec = make_spec(mask=MaskSpec(dense=NUMBERS, kinds=(PADDING,), own_rows=rows), needs_grad=needs_grad)
    names = ["math", "reference", "sdpa_cpu_flash", "rows", "untouched"]
    assert [name for name in names if not mask_limits.check_own_rows(spec, name)] == left
