from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load, on_tensors
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import pairs, running
from attn_compiler.verifying.values import Values
from tests.verifying.planning import LENGTH, Planned, Tensor, causal, masked, planned, qkv

PADDING = torch.tensor([[1] * LENGTH, [1, 1, 1, 0, 0, 1]])


@dataclass
class _Changed:
    """A plan whose one site has another condition."""

    found: Planned

    def to(self, condition: Expr | None) -> Planned:
        self.found.check("mask").site.condition = condition
        return self.found


def _mismatch(found: Planned) -> VerificationMismatch:
    with pytest.raises(VerificationMismatch) as caught:
        running.run_checks(found.plan, found.args)
    return caught.value


Q, K, B, H = (Index(name) for name in "qkbh")


def test_every_pair_is_compared() -> None:
    """One wrong pair of all is found, wherever it is."""
    right = ix.compare("<=", K, Q)
    wrong = ix.apply("and", ix.compare("==", Q, Const(4)), ix.compare("==", K, Const(2)))
    found = _Changed(planned(causal, *qkv())).to(ix.apply("xor", right, wrong))
    error = _mismatch(found)
    assert error.index == "b=0, h=0, q=4, k=2"
    assert error.differing.startswith("1 of ")
    assert error.observed == "masked out"


@pytest.mark.parametrize(("index", "place"), [(B, "b=1, h=0, q=0, k=0"), (H, "b=0, h=3, q=0, k=0")])
def test_axes_that_only_the_formula_varies_along(index: Index, place: str) -> None:
    last = ix.compare("==", index, Const(1 if index == B else 3))
    found = _Changed(planned(causal, *qkv())).to(ix.apply("and", ix.compare("<=", K, Q), ix.invert(last)))
    assert _mismatch(found).index == place


def test_axes_that_only_the_model_varies_along() -> None:
    found = _Changed(planned(masked, *qkv(), PADDING)).to(ix.TRUE)
    error = _mismatch(found)
    assert error.index == "b=1, h=0, q=0, k=3"
    assert error.observed == "allowed"
    assert "masked out" in error.expected


@pytest.mark.parametrize("most", [1, 7, 2**24])
def test_slices_of_any_size_find_the_same(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(pairs, "MOST_PAIRS", most)
    found = planned(causal, *qkv())
    assert running.run_checks(found.plan, found.args).found[0].elements == LENGTH * LENGTH
    _Changed(found).to(ix.apply("and", ix.compare("<=", K, Q), ix.compare("<", Q, Const(LENGTH - 1))))
    assert _mismatch(found).index == f"b=0, h=0, q={LENGTH - 1}, k=0"


def test_a_formula_that_reads_beyond_a_tensor_is_a_mismatch() -> None:
    found = planned(masked, *qkv(), PADDING)
    site = found.check("mask").site
    assert site.condition is not None
    (load,) = ix.loads(site.condition)
    _Changed(found).to(ix.as_bool(Load(load.tensor, (B, ix.add(K, ix.ONE)), load.kind)))
    error = _mismatch(found)
    assert "no value" in error.observed
    assert f"size {LENGTH}" in error.observed


def test_a_number_that_neither_allows_nor_masks() -> None:
    """What is added is -65504 only for some inputs."""

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT + bias).softmax(-1) @ v

    found = planned(function, *qkv(), torch.full((LENGTH, LENGTH), -1.0))
    check = found.check("mask")
    site = check.site
    assert site.spec is not None
    site.condition = ix.TRUE
    site.spec = dataclasses.replace(site.spec, score=dataclasses.replace(site.spec.score, proved=()))
    found.plan.checks.remove(found.check("bias"))
    check.skipped = None
    check.find_needs(Values(bodies=found.plan.mirrors))
    error = _mismatch(found)
    assert error.expected.startswith("neither allowed nor masked out")
    assert "-1.0" in error.expected


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        (None, "the mask was not read"),
        (ix.compare("<=", K, ix.Size("s99")), "s99"),
    ],
)
def test_what_has_no_value_is_skipped(condition: Any, why: str) -> None:
    found = _Changed(planned(causal, *qkv())).to(condition)
    mask, _ = running.run_checks(found.plan, found.args).found
    assert mask.skipped is not None
    assert why in mask.skipped


def test_an_op_without_a_meaning_on_tensors_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(on_tensors.ON_TENSORS, "abs")
    found = _Changed(planned(causal, *qkv())).to(ix.compare("<=", ix.Apply("abs", (K,)), Q))
    mask, _ = running.run_checks(found.plan, found.args).found
    assert mask.skipped is not None
    assert "'abs'" in mask.skipped


def test_a_load_of_a_tensor_that_is_not_known_can_not_be_recorded() -> None:
    found = _Changed(planned(causal, *qkv())).to(ix.as_bool(Load("unknown", (K,), "int")))
    check = found.check("mask")
    check.find_needs(Values(bodies=found.plan.mirrors))
    assert check.skipped == "where unknown is read from is not known"
