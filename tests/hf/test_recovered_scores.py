"""What real models add to their scores, recovered: each named, and equal to the model's own tensors at every index."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.spec.added_scores import Alibi, GatheredBias, ProvedScore, RegionPenalty, RelativeBias
from tests.hf.packages import Unavailable
from tests.hf.scenarios import SCENARIO, prepare
from tests.hf.survey import FAMILY
from tests.passes.recovered_sites import Recovered, recover

#: (family, scenario, implementation, the kinds of its sites, what masks besides them)
CASES: list[tuple[str, str, str, set[tuple[type[ProvedScore], ...]], set[str]]] = [
    ("bloom", "no_mask", "eager", {(Alibi,)}, {"causal"}),
    ("bloom", "padded", "eager", {(Alibi,)}, {"causal ∧ key padding attention_mask[b, k]"}),
    ("mpt", "dynamic", "eager", {(Alibi,)}, {"causal"}),
    ("falcon_alibi", "padded", "sdpa", {(Alibi,)}, {"causal ∧ key padding attention_mask[b, k]"}),
    ("falcon_alibi", "padded", "eager", {(Alibi,)}, {"causal ∧ key padding attention_mask[b, k]"}),
    ("t5", "training", "sdpa", {(RelativeBias,), ()}, {"causal", ""}),
    ("t5", "padded", "eager", {(RelativeBias,), ()}, {"causal", "key padding attention_mask[b, k]"}),
    ("t5", "dynamic", "sdpa", {(RelativeBias,), ()}, {"causal", ""}),
    ("swin", "training", "sdpa", {(GatheredBias,), (GatheredBias, RegionPenalty)}, {""}),
]


def _recovered(family: str, scenario: str, impl: str) -> list[Recovered]:
    found: list[Recovered] = []
    try:
        trial = prepare(FAMILY[family], SCENARIO[scenario], impl, "fp32")
    except Unavailable as missing:
        pytest.skip(str(missing))

    def capture(**inputs: Any) -> None:
        found.extend(recover(trial.model, dynamic=trial.scenario.dynamic or None, **inputs))

    with trial.context():
        trial.forward(trial.model, capture)
    return found


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    ("family", "scenario", "impl", "kinds", "masked"), CASES, ids=["-".join(case[:3]) for case in CASES]
)
def test_every_site_is_named_and_equal(
    family: str, scenario: str, impl: str, kinds: set[tuple[type[ProvedScore], ...]], masked: set[str]
) -> None:
    sites = _recovered(family, scenario, impl)
    assert {tuple(type(kind) for kind in site.meaning.scores) for site in sites} == kinds
    assert {" ∧ ".join(kind.words for kind in site.meaning.kinds) for site in sites} == masked
    assert all(site.meaning.reason is None for site in sites)
    # Of sites that mean the same one is enough: references are evaluated one score at a time.
    distinct = {(site.words, site.sizes()): site for site in sites}
    for site in distinct.values():
        assert site.worst() < 1e-5, site.words


@pytest.mark.further
def test_t5s_buckets_and_their_gradient() -> None:
    biases = [kind for site in _recovered("t5", "training", "sdpa") for kind in site.meaning.scores]
    assert len(biases) == 4
    for kind in biases:
        assert isinstance(kind, RelativeBias)
        assert kind.buckets is not None
        assert (kind.buckets.count, kind.buckets.max_distance) == (8, 20)
        assert kind.requires_grad
    assert {kind.buckets.both_ways for kind in biases if isinstance(kind, RelativeBias) and kind.buckets} == {
        True,
        False,
    }
