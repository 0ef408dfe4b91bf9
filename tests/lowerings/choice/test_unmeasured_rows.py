"""What is chosen on machines that were not measured is what the model of cost says, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.choice import evidence, priorities
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.options.options import Options
from attn_compiler.passes.writing.select import decide
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from benchmarks import select_cases
from tests.lowerings.choice import cost
from tests.lowerings.choice.test_cost import PYTORCHS, WITH_TENSOR, spec_of
from tests.lowerings.golden_decisions import of_any_length
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec

MACHINES = [80, 86, 89, 100, 103, 120]


def _sites() -> Iterator[AttentionSpec]:
    for name, case in select_cases.BY_NAME.items():
        if case.seqlen in (512, 2048, 8192) and name.startswith(WITH_TENSOR):
            for training in (False, True):
                yield spec_of(name, training)
                yield of_any_length(spec_of(name, training))
    sizes: dict[str, Any] = {"seqlen_q": 2048, "seqlen_kv": 2048}
    for head_dim in (64, 128, 256):
        for needs_grad in (False, True):
            made: dict[str, Any] = {**sizes, "head_dim": head_dim, "needs_grad": needs_grad}
            yield make_spec(mask=dense(2, 1, 2048, 2048), **made)
            yield make_spec(mask=dense(2, 1, 1, 2048), dropout_p=0.1, **made)
            yield make_spec(changes=(bias(1, 8, 2048, 2048, requires_grad=False),), **made)


@pytest.mark.parametrize("sm", MACHINES)
def test_on_other_machines_a_tensor_goes_to_the_kernel_that_the_model_says_takes_least(sm: int) -> None:
    """But for dense masks that were not proved, on sm100: nearly a tie by the model, and cuDNN's is asked first."""
    target, compared = Target.fake(sm=sm), 0
    for spec in _sites():
        if sm // 10 == 10 and "mask" in parts.parts(spec).kinds:
            assert priorities.order(spec, target)[:2] == ("sdpa_cudnn", "triton")
            continue
        names = [name for name in ("triton", *PYTORCHS) if not by_name(name).why_not(spec, target)]
        found = decide(spec, target, Options()).lowering
        wanted, least = cost.cheapest(names, spec, target), cost.seconds(found, spec, target)
        assert wanted is not None
        assert least is not None
        words = (found, wanted, spec.mask.words, spec.q.shape, spec.score.words, spec.needs_grad)
        assert least <= 1.001 * (cost.seconds(wanted, spec, target) or 0), words
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("seqlen", [2048, "s0"])
@pytest.mark.parametrize("change", [Sinks(requires_grad=False), Softcap(cap=30.0)])
def test_sinks_and_softcap_are_left_to_nobody(sm: int, seqlen: int | str, change: Any) -> None:
    for needs_grad in (False, True):
        spec = make_spec(
            mask=CAUSAL, changes=(change,), seqlen_q=seqlen, seqlen_kv=seqlen, head_dim=128, needs_grad=needs_grad
        )
        assert decide(spec, Target.fake(sm=sm), Options()).lowering == "triton"


def test_rows_say_that_nothing_was_measured() -> None:
    assert not any(row.measured for row in priorities.group("unmeasured"))
    found = evidence.evidence(make_spec(mask=dense(2, 1, 1, 2048), seqlen_q=2048, seqlen_kv=2048), Target.fake(sm=80))
    assert found is not None
    assert not found.measured
    assert found.why.startswith("not measured here: by pairs and bytes")


#: Seconds. Kernels that differ by less differ by less than one of them takes to be launched.
_A_LAUNCH = 10e-6
#: models whose proved masks stay tensors -> (batch, heads, queries, keys, head dim), and whether the model itself puts the mask into a bias
#: for each pair; else padding hides keys from one query
_DENSE_STILL = {
    "DeBERTa v3": ((8, 12, 512, 512, 64), True),
    "DeBERTa v3, longer": ((8, 12, 1024, 1024, 64), True),
    "Wav2Vec2-BERT": ((4, 16, 512, 512, 64), True),
    "Parakeet": ((4, 8, 250, 250, 128), True),
    "SigLIP 2, pooling": ((8, 12, 1, 256, 64), False),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("model", _DENSE_STILL)
def test_a_mask_that_stays_a_tensor_costs_no_more_than_a_launch(model: str, sm: int, training: bool) -> None:
    """Each kernel reads the bias, with the mask in it. Of one query the numbers are few beside the keys."""
    (batch, heads, queries, keys, head_dim), is_bias = _DENSE_STILL[model]
    sizes: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "heads_kv": heads,
        "seqlen_q": queries,
        "seqlen_kv": keys,
        "head_dim": head_dim,
        "needs_grad": training,
    }
    if is_bias:
        spec = make_spec(changes=(bias(batch, heads, queries, keys, requires_grad=training),), **sizes)
    else:
        spec = make_spec(mask=dense(batch, 1, 1, keys), **sizes)
    target = Target.fake(sm=sm)
    names = [name for name in ("triton", *PYTORCHS) if not by_name(name).why_not(spec, target)]
    found = decide(spec, target, Options()).lowering
    if found == "decode":
        # It reads no more of each key than they do, and the model says nothing of it.
        assert queries == 1
        return
    taken, least = (cost.seconds(name, spec, target) for name in (found, cost.cheapest(names, spec, target) or ""))
    assert taken is not None
    assert least is not None
    assert taken <= 1.001 * least + _A_LAUNCH
