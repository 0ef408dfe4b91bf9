"""Small models on a CUDA device: outputs and gradients follow the numeric rule, and the kernel that ran is the one reported."""

from __future__ import annotations

import pytest
import torch

import attn_compiler

pytest.importorskip("transformers", reason="these tests compile models of transformers: pip install -e '.[models]'")

from benchmarks import bench_h200, compare, harness, models

LAYERS = {"llama": 4, "gpt2": 2, "bert": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", ["prefill", "prefill_padded", "train"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", LAYERS)
def test_right_numbers_from_the_reported_kernel(family: str, implementation: str, scenario: str) -> None:
    attn_compiler.reset()
    way = models.SCENARIOS[scenario]
    case = bench_h200.Measured(family=family, implementation=implementation, scenario=way).case("small", "cuda:0")
    model = torch.compile(case.model, backend="attn_compiler")
    step = harness.make_step(model, case.inputs, training=case.training, valid=case.valid)
    step()

    errors = compare.numerics(case, step)
    assert errors["numerics"] == "ok", errors
    chosen = compare.chosen(attn_compiler.reports())
    assert (chosen["sites"], chosen["misses"]) == (str(LAYERS[family]), "0")
    kernels = bench_h200.attention_kernels(step)
    assert bench_h200.pinned(chosen["lowerings"], kernels) == "yes", (chosen, list(kernels))


@pytest.mark.gpu
def test_padding_follows_its_tensor_when_a_cuda_graph_is_replayed() -> None:
    """mode="reduce-overhead": the lists of tiles are made anew in every replay, from what the mask holds then."""
    attn_compiler.reset()
    way = models.SCENARIOS["prefill_padded"]
    case = bench_h200.Measured(family="llama", implementation="sdpa", scenario=way).case("small", "cuda:0")
    model = torch.compile(case.model, backend="attn_compiler", mode="reduce-overhead")
    given = dict(case.inputs)
    with torch.no_grad():
        for shown in (1024, 700, 3, 512):
            mask = torch.zeros_like(given["attention_mask"])
            mask[:, -shown:] = 1
            given["attention_mask"] = mask
            torch.compiler.cudagraph_mark_step_begin()
            found = model(**given).last_hidden_state.float()
            expected = case.model(**given).last_hidden_state.float()
            difference = (found - expected).abs()[mask.bool()].max()
            assert difference < 0.1, (shown, difference)
    assert compare.chosen(attn_compiler.reports())["lowerings"] == "triton x4"


@pytest.mark.gpu
def test_one_compilation_serves_every_length_of_padded_prompts() -> None:
    attn_compiler.reset()
    way = models.SCENARIOS["prefill_padded"]
    case = bench_h200.Measured(family="llama", implementation="sdpa", scenario=way).case("small", "cuda:0")
    model = torch.compile(case.model, backend="attn_compiler", dynamic=True)
    with torch.no_grad():
        for length in (700, 1000, 520, 41):
            given = {"input_ids": case.inputs["input_ids"][:, :length], "use_cache": False}
            given["attention_mask"] = case.inputs["attention_mask"][:, -length:].contiguous()
            found, expected = model(**given).last_hidden_state.float(), case.model(**given).last_hidden_state.float()
            difference = (found - expected).abs()[given["attention_mask"].bool()].max()
            assert difference < 0.1, (length, difference)
    assert len(attn_compiler.reports()) == 1
