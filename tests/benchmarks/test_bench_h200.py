from __future__ import annotations

import pytest

from benchmarks import bench_h200, inputs

FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0"
EFFICIENT = "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)"


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
    assert names == {("llama", name) for name in inputs.SCENARIOS} | {("vit", "prefill"), ("vit", "train")}
    assert {m.implementation for m in plan} == {"sdpa", "eager"}
