from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from benchmarks import bench_h200, compare, inputs
from benchmarks.compare import Case

FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0"
EFFICIENT = "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)"
FA4 = "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor0"


@pytest.mark.parametrize(
    ("lowerings", "kernels", "answer"),
    [
        ("sdpa_flash x8", [FLASH], "yes"),
        ("sdpa_cudnn x8", [CUDNN], "yes"),
        ("sdpa_efficient x8", [EFFICIENT], "yes"),
        ("sdpa_cudnn x8", [FLASH], "NO"),
        ("sdpa_flash x8", [], "NO"),
        ("sdpa_flash x8", [FLASH, EFFICIENT], "NO"),
        ("sdpa_flash x4 + untouched x4", [FLASH, EFFICIENT], "yes"),
        ("sdpa_flash x4 + sdpa_efficient x4", [FLASH, EFFICIENT], "yes"),
        ("cudnn x8", [CUDNN], "yes"),
        ("fa4 x8", [FA4], "yes"),
        ("sdpa_flash x8", [FA4], "NO"),
        ("fa4 x8", [FLASH], "NO"),
        ("cudnn x8", [FLASH], "NO"),
        ("triton x8", ["attention_forward", "attention_grad_q", "attention_grad_kv"], "yes"),
        ("hopper x8", ["attention_forward_sm90", "attention_again", "attention_grad_kv"], "yes"),
        ("hopper x8", ["attention_forward_sm90", CUDNN], "yes"),
        ("hopper x8", ["attention_forward"], "NO"),
        ("triton x8", ["attention_forward_sm90"], "NO"),
        ("untouched x8", [EFFICIENT], ""),
        ("", [], ""),
    ],
)
def test_pinned_says_whether_the_named_kernels_ran_and_no_other(
    lowerings: str, kernels: list[str], answer: str
) -> None:
    assert bench_h200.pinned(lowerings, dict.fromkeys(kernels)) == answer


def test_the_plan_covers_every_family_and_calls_none_as_it_can_not_be_called() -> None:
    plan = list(bench_h200.plan(["llama", "vit"], list(inputs.SCENARIOS)))
    names = {(m.family, m.scenario.name) for m in plan}
    assert names == {("llama", name) for name in inputs.SCENARIOS} | {
        ("vit", "prefill"),
        ("vit", "train"),
        ("vit", "train_checkpointed"),
    }
    assert {m.implementation for m in plan} == {"sdpa", "eager", "flex_attention"}


def test_a_pattern_may_force_a_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = bench_h200.wanted(bench_h200.plan(["bert"], ["train"]), ["bert/sdpa/train=triton"])
    assert case.words == "bert/sdpa/train=triton"
    assert case.names["forced"] == "triton"
    asked = []
    monkeypatch.setattr(compare, "compile_both", lambda case, options: asked.append(options) or {})
    made = Case(model=torch.nn.Linear(1, 1), inputs={})
    measured = [dataclasses.replace(case, forced=forced) for forced in ("triton", "", "nothing")]
    (checkpointed,) = bench_h200.wanted(bench_h200.plan(["llama"], ["train_checkpointed"]), ["llama/sdpa/*"])
    for each in (*measured, checkpointed):
        bench_h200.compiled(made, each.options, "cpu", contextlib.nullcontext())
    assert asked == [{"lowering": "triton"}, None, None, {"checkpoint": "keep_attention"}]


def case_of(family: str, implementation: str) -> Case:
    pytest.importorskip("transformers", reason="the registry names models of transformers: pip install -e '.[models]'")
    scenario = inputs.SCENARIOS["prefill"]
    return bench_h200.Measured(family=family, implementation=implementation, scenario=scenario).case("small", "cpu")


@pytest.mark.parametrize(("family", "ours"), [("qwen3", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")])
def test_flex_attention_is_beside_the_same_model_with_an_attention_of_ours(family: str, ours: str) -> None:
    case = case_of(family, "flex_attention")
    assert case.baseline is not None
    assert case.baseline.config._attn_implementation == "flex_attention"
    assert case.model.config._attn_implementation == ours
    for mine, other in zip(case.model.parameters(), case.baseline.parameters(), strict=True):
        assert mine.equal(other)
    assert case_of(family, "eager").baseline is None


def test_the_bound_is_a_model_without_attention_on_our_side() -> None:
    pytest.importorskip("transformers", reason="the registry names models of transformers: pip install -e '.[models]'")
    plan = bench_h200.plan(["bert"], ["prefill"])
    (measured,) = bench_h200.wanted(plan, ["bert/sdpa/prefill=nothing"])
    case = measured.case("small", "cpu")
    assert case.baseline is not None
    assert case.baseline.config._attn_implementation == "sdpa"
    assert case.model.config._attn_implementation == "nothing"
