"""What our Triton kernels can't do, at the limit and beyond; what 32 bits can't count; releases of Triton, tried or not."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attn_compiler import lowerings
from attn_compiler.lowerings import LOWERINGS, by_name
from attn_compiler.lowerings.shared.limits import kernel_limits, offset_limits, triton_releases, untried
from attn_compiler.lowerings.shared.limits.triton_releases import COMPILED, Release
from attn_compiler.lowerings.shared.parts.kernel_plan import FARTHEST, MOST_BLOCKS, MOST_POSITIONS
from attn_compiler.options.options import Options
from attn_compiler.passes.writing.select import decide
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import inductor as torch_inductor
from tests.lowerings import specs
from tests.lowerings.fa4.test_lowering import H200 as WITH_FA4
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec, words

# What our Triton kernels can't do, whichever family launches them.
H200 = Target.fake()
INTERPRETED = Target.fake(device="cpu", triton_interpreted=True)


def said(target: Target = H200, **spec: Any) -> str:
    return words(kernel_limits.check_site(make_spec(**spec), target))


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Target.fake(sm=80), ""),
        (Target.fake(sm=75), "GPU architecture from sm80"),
        (Target.fake(triton=""), "Triton 3.6 or newer is installed; observed no Triton"),
        (Target.fake(triton="3.5.1"), "Triton 3.6 or newer is installed; observed 3.5.1"),
        (Target.fake(triton="3.6.0"), ""),
        (Target.fake(triton="3.10.0"), ""),
        (Target.fake(device="cpu"), "NVIDIA GPU"),
        (INTERPRETED, ""),
        (Target.fake(device="cpu", triton_interpreted=True, triton=""), "observed no Triton"),
    ],
)
def test_machines(target: Target, reason: str) -> None:
    found = words(kernel_limits.check_machine(target))
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_machine_that_runs_none_has_that_reason_alone() -> None:
    found = kernel_limits.check_site(make_spec(dtype="float64", head_dim=999), Target.fake(sm=70))
    assert found == kernel_limits.check_machine(Target.fake(sm=70))


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_the_interpreter_computes_no_bfloat16(dtype: str) -> None:
    found = said(INTERPRETED, device="cpu", dtype=dtype)
    assert bool(found) == (dtype == "bfloat16")
    assert said(H200, dtype=dtype) == ""


@pytest.mark.parametrize("sm", [80, 86, 87, 89, 90, 100, 120])
def test_what_there_is_no_room_for_beside_wide_heads(sm: int) -> None:
    target, is_small = Target.fake(sm=sm), sm in (86, 87, 89, 120)
    most = 128 if is_small else 256
    where = "on sm86 to sm89 and from sm120 on, " if is_small else ""
    learned = f"{where}head dims are at most {most} where what is added to the scores is learned"
    for what, given in (
        (f"{where}head dims are at most {most} in float32", {"dtype": "float32", "needs_grad": False}),
        (learned, {"changes": (bias(1, 1, 128, 128),)}),
    ):
        assert said(target, head_dim=most, **given) == ""
        assert what in said(target, head_dim=most + 8, **given)
        assert what in said(target, head_dim=64, head_dim_v=most + 8, **given)
    for given in ({}, {"needs_grad": False}, {"changes": (bias(1, 1, 128, 128, requires_grad=False),)}):
        assert said(target, head_dim=512, **given) == ""
    assert said(target, head_dim=512, changes=(bias(1, 1, 128, 128),), needs_grad=False) == ""


@pytest.mark.parametrize("sm", [80, 89, 120])
def test_a_dense_mask_has_no_room_beside_the_gradients_of_the_widest_heads(sm: int) -> None:
    target, mask, rule = Target.fake(sm=sm), dense(1, 1, 128, 128), "at most 256 with gradients beside a dense mask"
    assert (rule in said(target, head_dim=264, mask=mask)) == (sm != 80)
    assert said(target, head_dim=256, mask=mask) == said(target, head_dim=512, mask=mask, needs_grad=False) == ""


@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_kv"])
def test_positions_are_counted_in_32_bits(name: str) -> None:
    assert said(**{name: MOST_POSITIONS}) == ""
    assert f"{name} {MOST_POSITIONS + 1}" in said(**{name: MOST_POSITIONS + 1})
    assert said(**{name: "s0"}) == ""


def test_batch_and_heads_are_counted_together() -> None:
    assert "batch · num_heads_q is at most" not in said(batch=MOST_BLOCKS // 8, heads=8)
    assert "batch · num_heads_q is at most" in said(batch=MOST_BLOCKS // 8 + 1, heads=8)
    assert "batch · num_heads_q is at most" not in said(batch="s0", heads=8)


def test_a_learned_bias_is_summed_over_so_many_tiles() -> None:
    sizes = {"batch": 65535, "heads": 1, "heads_kv": 1, "seqlen_q": 8192, "seqlen_kv": 8192}
    rule = "is added to the scores of at most"
    assert rule in said(**sizes, changes=(bias(1, 1, 1, 1),))
    # Of a bias for each query and key, a tile of it is one program's.
    assert rule not in said(**sizes, changes=(bias(1, 1, 8192, 8192),))
    assert rule not in said(**sizes, changes=(bias(1, 1, 1, 1, requires_grad=False),))
    assert rule not in said(**sizes, changes=(bias(1, 1, 1, 1),), needs_grad=False)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"head_dim": 12}, "multiple of 8"),
        ({"head_dim": 12, "dtype": "float32"}, ""),
        ({"head_dim": 512}, ""),
        ({"head_dim": 520}, "at most 512"),
        ({"dtype": "float64"}, "observed float64"),
        ({"mask": dense(1, 1, 128, 128, dtype="float64")}, "the mask is"),
        ({"scale": -2.0}, ""),
        ({"scale": 1e4}, "the scale is at most 256"),
        ({"dropout_p": 0.1}, ""),
    ],
)
def test_what_they_take(given: dict[str, Any], rule: str) -> None:
    found = said(**given)
    assert rule in found
    assert bool(found) == bool(rule)


def test_what_they_ask_of_strides() -> None:
    assert (kernel_limits.DEMAND.alignment, kernel_limits.DEMAND.farthest) == (16, FARTHEST)


# What 32 bits can't count is refused by name.
SM90_H200 = Target.fake(sm=90)
LARGE: dict[str, Any] = {"batch": 33, "heads": 32, "heads_kv": 32, "seqlen_q": 32768, "seqlen_kv": 32768}


def why_not(name: str, spec: Any, target: Target = SM90_H200) -> str:
    return "; ".join(map(str, by_name(name).why_not(spec, target)))


def test_what_cute_can_not_count_is_refused() -> None:
    assert "offsets are of 32 bits" in why_not("fa4", specs.make_spec(**LARGE), WITH_FA4)
    assert not offset_limits.check_spans(specs.make_spec(**LARGE | {"batch": 32}))
    spec = specs.make_spec()
    far = dataclasses.replace(spec, k=dataclasses.replace(spec.k, strides=(2**31, 8192, 64, 1)))
    (reason,) = offset_limits.check_spans(far)
    assert reason.observed == f"k {2**31 + 7 * 8192 + 127 * 64 + 64}"
    assert not offset_limits.check_spans(specs.make_spec(**LARGE | {"batch": "s0"}))


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({"mask": specs.dense(1, 1, 46344, 46344)}, True),
        ({"mask": specs.dense(46344, 46344)}, True),
        ({"mask": specs.dense(1, 1, 1, 46344)}, False),
        ({"mask": specs.CAUSAL}, False),
        ({"mask": specs.CAUSAL, "dropout_p": 0.5}, True),
    ],
)
def test_where_a_row_of_scores_begins(given: dict[str, Any], is_refused: bool) -> None:
    spec = specs.make_spec(batch=1, seqlen_q=46344, seqlen_kv=46344, **given)
    assert ("pairs of a head" in why_not("sdpa_efficient", spec)) is is_refused


def test_strides_of_the_efficient_kernel() -> None:
    spec = specs.make_spec()
    far = dataclasses.replace(spec, q=dataclasses.replace(spec.q, strides=(64, 2**31, 128, 1)))
    assert "strides of heads and positions" in why_not("sdpa_efficient", far)
    assert why_not("sdpa_efficient", spec) == ""


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def emptied() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def far_apart(x: Tensor) -> Tensor:
    """The same numbers with batch rows 4 GB apart: the second one lies beyond 2^31 elements."""
    stride = 2**31 - 2**31 % 1024 + 1024
    memory = torch.empty(stride + x[0].numel(), dtype=x.dtype, device=x.device)
    batch_row = x[0].stride()
    return memory.as_strided(x.shape, (stride, *batch_row)).copy_(x)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(
    "lowering", ["triton", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "cudnn", "fa4", "hopper_fp8"]
)
@pytest.mark.usefixtures("emptied")
def test_batch_rows_beyond_32_bits(lowering: str) -> None:
    """Forward and gradients of k that reaches beyond: right, or refused by name."""
    from attn_compiler import Fp8Recipe

    target = Target.current("cuda")
    if by_name(lowering).unavailable(target):
        pytest.skip("not on this machine")
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("takes 24 GB")
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda").bfloat16().transpose(1, 2) for _ in "qkv")
    options: dict[str, Any] = {"lowering": lowering, "strict": True}
    options |= {"fp8_recipe": Fp8Recipe(force=True)} if "fp8" in lowering else {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled: Any = torch.compile(attention, backend="attn_compiler", options=options, dynamic=False)
    found = []
    for far in (k, far_apart(k)):
        leaves = [x.detach().requires_grad_() for x in (q, far, v)]
        try:
            out = compiled(*leaves)
        except Exception as refused:
            if "32 bits" in str(refused):
                return
            raise
        found.append([out, *torch.autograd.grad(out.float().sum(), leaves)])
    for mine, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-2)


# The releases of Triton that a family's kernels are known with.
@pytest.mark.parametrize(
    ("releases", "said"),
    [(((3, 6),), "3.6"), (((3, 6), (3, 10)), "3.6 or 3.10"), (((3, 6), (3, 7), (3, 9)), "3.6, 3.7 or 3.9")],
)
def test_words(releases: tuple[Release, ...], said: str) -> None:
    assert triton_releases.words(releases) == said


def test_the_remedy_is_the_newest() -> None:
    assert triton_releases.remedy(((3, 6), (3, 10))) == "pip install 'triton==3.10.*'"


@pytest.mark.parametrize("name", COMPILED)
def test_they_are_in_order(name: str) -> None:
    assert list(COMPILED[name]) == sorted(set(COMPILED[name]))


def test_every_lowering_that_needs_triton_has_a_line() -> None:
    """Without Triton on Hopper it is unavailable, and with it not."""
    without, with_it = Target.fake(triton=""), Target.fake(triton="3.7.1")
    of_triton = {x.name for x in LOWERINGS if x.unavailable(without) and not x.unavailable(with_it)}
    assert of_triton == set(COMPILED) - {"decode_latent_sm90"}


# What a release that was not tried costs.
NEWER, TRIED = Target.fake(triton="3.10.0", torch="2.16.0"), Target.fake(triton="3.9.0", torch="2.15.0")
SPEC = make_spec(mask=CAUSAL)


@pytest.fixture(autouse=True)
def _disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(torch_inductor, "cache_folder", lambda: tmp_path)
    untried._known.cache_clear()
    yield
    untried._known.cache_clear()


def test_the_lowering_is_refused_on_that_machine_and_the_next_one_serves() -> None:
    options = Options(lowerings=("triton", "math"))
    assert decide(SPEC, NEWER, options).lowering == "triton"
    untried.note("triton", NEWER, "CompilationError: no _replace")
    found = decide(SPEC, NEWER, options)
    assert found.lowering == "math"
    (reason,) = found.refusals[0].reasons
    assert reason.code is Code.NOT_COMPILED
    assert "triton 3.10 was not tried" in reason.rule
    assert reason.observed == "CompilationError: no _replace"
    assert decide(SPEC, TRIED, options).lowering == "triton"
    assert lowerings.cannot_build("math", SPEC, NEWER) == []


def test_the_next_process_knows(tmp_path: Path) -> None:
    untried.note("triton", NEWER, "no")
    untried.note("decode", NEWER, "nor this")
    untried._known.cache_clear()
    assert [reason.observed for reason in untried.reasons("triton", NEWER)] == ["no"]
    assert [reason.observed for reason in untried.reasons("decode", NEWER)] == ["nor this"]
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_with_releases_that_were_tried_nothing_is_kept(tmp_path: Path) -> None:
    untried.note("triton", TRIED, "no")
    assert untried.reasons("triton", TRIED) == []
    assert list(tmp_path.rglob("*")) == []


def test_a_folder_that_can_not_be_made_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise OSError("read-only")

    monkeypatch.setattr(torch_inductor, "cache_folder", fail)
    untried.note("triton", NEWER, "no")
    assert untried.reasons("triton", NEWER) == []
