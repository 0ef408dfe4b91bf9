"""What can't be told, or done, of an attention over the whole sequence; and how ranks share it."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import dropout, scaled_dot_product_attention

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.passes.context_parallel import sites
from attn_compiler.passes.context_parallel.refusing import CannotShard
from attn_compiler.passes.graph.site import Keyless
from attn_compiler.reasons.errors import ContextParallelUnsupported
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import Sinks, Softcap, Unusual
from tests.lowerings.specs import CAUSAL, bias, make_spec
from tests.passes.context_parallel.compiled import BATCH, LENGTH, WIDTH, Data, Model, compile_and_run

#: the first query alone has keys
SHUT_OUT = Keyless(allowed=ix.compare("<=", Index("q"), ix.ZERO), highest=-1e9)


def _site(**changed: Any) -> Any:
    scores, axes = SimpleNamespace(limits=changed.pop("limits", ())), SimpleNamespace(query=())
    match = SimpleNamespace(out="out", scores=scores, axes=axes)
    return SimpleNamespace(match=match, keyless=changed.pop("keyless", None))


def test_numbers_of_which_the_highest_count_are_refused() -> None:
    spec = make_spec()
    spec = dataclasses.replace(spec, score=dataclasses.replace(spec.score, by_highest=True))
    with pytest.raises(CannotShard) as caught:
        sites.check_shareable(_site(), spec)
    assert "the highest count" in caught.value.reason.observed


@pytest.mark.parametrize(
    "spec", [{}, {"mask": CAUSAL}, {"changes": (Softcap(cap=30.0), Sinks(requires_grad=False))}], ids=str
)
def test_what_is_understood_is_taken(spec: dict[str, Any]) -> None:
    sites.check_shareable(_site(), make_spec(**spec))


@pytest.mark.parametrize(
    ("spec", "observed"),
    [
        ({"mask": MaskSpec(reason="it reads the weather")}, "the mask was not understood: it reads the weather"),
        ({"changes": (Unusual(what="a step"),)}, "the scores are changed"),
        ({"changes": (bias(1, 8, 128, 128),)}, "the scores are changed"),
        ({"dropout_p": 0.1}, "dropout 0.1"),
        ({"returns_weights": True}, "they are read"),
        ({"seqlen_kv": 256}, "128 queries and 256 keys"),
        ({"batch": "s0"}, "s0"),
    ],
)
def test_what_is_not_is_refused(spec: dict[str, Any], observed: str) -> None:
    with pytest.raises(CannotShard) as caught:
        sites.check_shareable(_site(), make_spec(**spec))
    assert observed in caught.value.reason.observed
    assert caught.value.at == "out"


@pytest.mark.parametrize(
    ("changed", "observed"), [({"limits": ("low",)}, "clamped"), ({"keyless": SHUT_OUT}, "shuts out")]
)
def test_what_a_match_has_besides_is_refused(changed: dict[str, Any], observed: str) -> None:
    with pytest.raises(CannotShard) as caught:
        sites.check_shareable(_site(**changed), make_spec())
    assert observed in f"{caught.value.reason.rule} {caught.value.reason.observed}"


def test_a_scale_that_looks_like_the_length_is_refused() -> None:
    def by_length(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / LENGTH)

    with pytest.raises(ContextParallelUnsupported, match="the scale of scores does not depend"):
        compile_and_run(attend=by_length)


def _written_out(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    at = torch.arange(q.shape[2])
    scores = torch.tanh(q @ k.mT * 0.3 / 5) * 5
    return scores.masked_fill(at[:, None] < at, -math.inf).softmax(-1) @ v


def test_changed_scores_are_written_out_for_the_whole_sequence() -> None:
    assert compile_and_run(attend=_written_out).shape == (BATCH, LENGTH, WIDTH)


def test_the_weights_may_not_be_dropped_or_read() -> None:
    def dropped(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        return dropout((q @ k.mT).softmax(-1), 0.5) @ v

    with pytest.raises(ContextParallelUnsupported, match="no weights are dropped"):
        compile_and_run(attend=dropped)
