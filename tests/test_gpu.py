"""Small models on a CUDA device: outputs and gradients follow the numeric rule, and the kernel that ran is the one reported."""

from __future__ import annotations

import pytest
import torch

import attn_compiler

pytest.importorskip("transformers", reason="these tests compile models of transformers: pip install -e '.[models]'")

from benchmarks import bench_h200, compare, harness, inputs

LAYERS = {"llama": 4, "gpt2": 2, "bert": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", ["prefill", "prefill_padded", "train"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", LAYERS)
def test_right_numbers_from_the_reported_kernel(family: str, implementation: str, scenario: str) -> None:
    attn_compiler.reset()
    way = inputs.SCENARIOS[scenario]
    case = bench_h200.Measured(family=family, implementation=implementation, scenario=way).case("small", "cuda:0")
    model = torch.compile(case.model, backend="attn_compiler")
    step = harness.make_step(model, case.inputs, training=case.training)
    step()

    errors = compare.numerics(case, step)
    assert errors["numerics"] == "ok", errors
    chosen = compare.chosen(attn_compiler.reports())
    assert (chosen["sites"], chosen["misses"]) == (str(LAYERS[family]), "0")
    kernels = bench_h200.attention_kernels(step)
    assert bench_h200.pinned(chosen["lowerings"], kernels) == "yes", (chosen, list(kernels))
