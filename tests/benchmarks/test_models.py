from __future__ import annotations

import pytest
import torch

import attn_compiler
from benchmarks import inputs, models

pytest.importorskip("transformers", reason="the registry names models of transformers: pip install -e '.[models]'")


@pytest.mark.in_turns(13)
@pytest.mark.parametrize("name", models.FAMILIES)
def test_every_small_family_runs_in_every_way(name: str) -> None:
    model = models.build(name, "small", "eager")
    for scenario in inputs.SCENARIOS.values():
        if inputs.applies(name, scenario):
            with torch.no_grad():
                output = model(**inputs.example_inputs(name, "small", scenario))[0]
            assert output.isfinite().all(), scenario.name


def test_the_same_seed_gives_the_same_model_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second = (models.build("gpt2", "small", "sdpa").state_dict() for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(first, second)


def test_a_full_size_is_a_real_width() -> None:
    for name, family in models.FAMILIES.items():
        full, small = family.sizes["full"], family.sizes["small"]
        assert full.batch * full.seqlen > small.batch * small.seqlen, name


def test_padding_comes_first_for_a_decoder_and_last_for_an_encoder() -> None:
    left, right = (inputs.padding_mask(4, 8, left=side) for side in (True, False))
    assert left[:, -1].tolist() == [1, 1, 1, 1] == right[:, 0].tolist()
    assert left.sum(1).tolist() == right.sum(1).tolist() == [8, 7, 6, 5]


@pytest.mark.parametrize(("heads", "seqlen"), [(8, 6), (2, 6), (4, 3), (8, 9)])
def test_nothing_reads_q_k_and_v_and_has_gradients_of_all(heads: int, seqlen: int) -> None:
    q = torch.randn(2, 8, 6, 4, requires_grad=True)
    k, v = (torch.randn(2, heads, seqlen, 4, requires_grad=True) for _ in range(2))
    out, weights = models.nothing(torch.nn.Identity(), q, k, v, None, scaling=1.0)
    assert out.shape == (2, 6, 8, 4)
    assert weights is None
    assert all(bool(grad.any()) for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_a_model_whose_attention_is_nothing_has_none() -> None:
    model = models.build("bert", "small", models.NOTHING)
    with torch.no_grad():
        reports = attn_compiler.explain(model, **inputs.example_inputs("bert", "small", inputs.SCENARIOS["prefill"]))
    assert not any(report.sites for report in reports)
