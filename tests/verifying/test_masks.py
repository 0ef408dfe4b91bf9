"""Masks, shared operands and outputs of a site against the model's own."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.index_expr import Const, Expr, Index, Load, on_tensors
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting.verifications import Verification
from attn_compiler.verifying import outputs, pairs, running
from attn_compiler.verifying.ranks import Ranks, SharedCheck, WholeLoads
from attn_compiler.verifying.values import Key, Values
from tests.verifying.planning import LENGTH, SHAPE, Planned, Tensor, causal, masked, planned, qkv

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


def _with_factor(found: Planned, factor: float) -> Planned:
    """The same plan, with a kernel whose result is too large by a factor."""
    check = found.check("output")
    assert check.new_out is not None
    graph = check.new_out.graph
    with graph.inserting_after(check.new_out):
        check.new_out = graph.call_function(torch.mul, (check.new_out, factor))
    check.body.outs[check.new_out.name] = check.body.outs[str(check.new_out.args[0])]
    del check.body.outs[str(check.new_out.args[0])]
    return found


# Off by a part of 1 of the result: what has to be allowed, and what has to be noticed.
@pytest.mark.parametrize(
    ("dtype", "little", "much"),
    [(torch.float32, 1e-7, 1e-5), (torch.bfloat16, 2e-3, 5e-2), (torch.float16, 2e-4, 5e-3)],
    ids=lambda x: str(x)[6:] if isinstance(x, torch.dtype) else None,
)
def test_the_rule_is_neither_too_strict_nor_too_lax(dtype: torch.dtype, little: float, much: float) -> None:
    found = _with_factor(planned(causal, *qkv(dtype=dtype)), 1 + little)
    assert running.run_checks(found.plan, found.args).found[-1].skipped is None
    found = _with_factor(planned(causal, *qkv(dtype=dtype)), 1 + much)
    with pytest.raises(VerificationMismatch, match="output of sdpa_cpu_flash"):
        running.run_checks(found.plan, found.args)


def test_errors_of_small_results_count() -> None:
    """The rounding that is allowed is that of the values, not an absolute number."""
    q, k, v = qkv()
    found = _with_factor(planned(causal, q, k, v * 1e-6), 1 + 1e-3)
    with pytest.raises(VerificationMismatch):
        running.run_checks(found.plan, found.args)


def test_another_dtype_is_a_mismatch() -> None:
    found = planned(causal, *qkv())
    check = found.check("output")
    assert check.new_out is not None
    graph = check.new_out.graph
    old = check.new_out
    with graph.inserting_after(old):
        check.new_out = graph.call_function(torch.Tensor.double, (old,))
    check.body.outs[check.new_out.name] = check.body.outs.pop(old.name)
    with pytest.raises(VerificationMismatch, match=r"torch\.float64 .*differ"):
        running.run_checks(found.plan, found.args)


def test_a_site_of_the_model_that_wrote_its_scores_in_place() -> None:
    """The exact result is made from copies, so that the model's own values stay what they are."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores *= 0.3
        scores.masked_fill_(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ v + q

    found = planned(function, *qkv())
    output = running.run_checks(found.plan, found.args).found[-1]
    assert output.skipped is None
    assert output.elements == math.prod(SHAPE)


def test_exact_results_are_closer_than_the_models_own() -> None:
    found = planned(masked, *qkv(dtype=torch.float32), torch.ones(2, 6, dtype=torch.int64))
    output = running.run_checks(found.plan, found.args).found[-1]
    assert output.error is not None
    assert 0 < output.error < 1e-6


def test_where_the_model_itself_overflows_there_is_nothing_to_compare() -> None:
    q, k, v = qkv(dtype=torch.float16)
    v[0, 0, 0, 0] = torch.inf
    found = planned(causal, q, k, v)
    output = running.run_checks(found.plan, found.args).found[-1]
    assert output.skipped is None


def test_not_enough_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    found = planned(causal, *qkv())
    monkeypatch.setattr(outputs, "recomputed", full)
    output = running.run_checks(found.plan, found.args).found[-1]
    assert output.skipped == "there is not enough memory for the exact result"


# One rank that has the whole sequence.
MASK = torch.tensor([[1] * LENGTH, [0, *[1] * (LENGTH - 1)]])


class _Alone(Ranks):
    """A rank that has all positions."""

    def meet(self, subject: str) -> None:
        assert subject.startswith("the attention of")

    def whole(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x


class _Reversed(_Alone):
    """What the rank has of keys, values and masks is put together the wrong way; but for q, which stays."""

    def whole(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.flip(axis) if x.is_floating_point() else x


def _planned(ranks: type[Ranks]) -> Planned:
    found = planned(masked, *qkv(), MASK)
    check = found.check("output")
    assert check.site.spec is not None
    assert check.new_out is not None
    nodes = {node.name: node for node in found.plan.module.graph.nodes}
    (mask,) = (name for name in nodes if "attention_mask" in name)
    shared = SharedCheck(
        site=check.site,
        body=check.body,
        new_out=check.new_out,
        spec=check.site.spec,
        whole=WholeLoads(body=check.body, nodes=nodes, axes={mask: 1}),
        ranks=ranks(layout=Layout(size=1, balanced=False), rank=0, group=""),
    )
    found.plan.checks[found.plan.checks.index(check)] = shared
    shared.find_needs(Values(bodies=found.plan.mirrors))
    return found


def _output(found: Planned) -> Verification:
    return next(x for x in running.run_checks(found.plan, found.args).found if x.subject == "output")


def test_a_rank_with_the_whole_sequence_holds() -> None:
    output = _output(_planned(_Alone))
    assert output.skipped is None
    assert output.elements == SHAPE[0] * SHAPE[1] * LENGTH * SHAPE[3]


def test_keys_in_another_order_beside_their_padding_are_told() -> None:
    with pytest.raises(VerificationMismatch) as error:
        _output(_planned(_Reversed))
    assert error.value.what == "output of sdpa_cpu_flash over the whole sequence"
    assert "attention_mask" in error.value.formula


def test_what_was_misread_is_told_by_the_model_s_own_part() -> None:
    found = _planned(_Alone)
    check = found.check("output")
    score = dataclasses.replace(check.spec.score, scale=2 * check.spec.score.scale)
    check.spec = dataclasses.replace(check.spec, score=score)
    with pytest.raises(VerificationMismatch, match="attention as it was read"):
        _output(found)


def test_what_comes_after_goes_on_with_the_attention_over_the_whole_sequence() -> None:
    found = _planned(_Alone)
    check = found.check("output")
    other = qkv()[0].new_full(SHAPE, 0.25)

    class _Whole(_Alone):
        def whole(self, x: torch.Tensor, axis: int) -> torch.Tensor:
            return torch.full_like(x, 0.25) if x.is_floating_point() else x

    check.ranks = _Whole(layout=Layout(size=1, balanced=False), rank=0, group="")
    # The rewritten graph is given the same values, so that nothing differs.
    graph = check.new_out.graph
    with graph.inserting_after(check.new_out):
        check.new_out = graph.call_function(torch.full_like, (check.new_out, 0.25))
    check.find_needs(Values(bodies=found.plan.mirrors))
    (out,) = running.run_checks(found.plan, found.args).ran.outs
    assert torch.allclose(out, other)


# What a check asks for before anything runs, and what it says of a site that can't be checked.
def test_what_it_needs_is_what_it_reads() -> None:
    found = planned(causal, *qkv())
    mask, output = found.check("mask"), found.check("output")
    assert {key.name for key in mask.needs} == {"le"}
    assert mask.needs < output.needs
    assert {"l_q_", "l_k_", "l_v_"} < {key.name for key in output.needs}
    recorded: dict[Key, torch.Tensor] = {}
    values = Values(bodies=found.plan.mirrors, recorded=recorded)
    output.find_needs(values)
    assert recorded == {}


def test_a_site_without_a_kernel_has_nothing_to_compare() -> None:
    check = planned(causal, *qkv(), lowerings=("untouched",)).check("output")
    assert check.skipped == "the site is as the model made it"
    assert check.is_as_it_was


def test_what_was_read_is_said() -> None:
    found = planned(causal, *qkv())
    assert (found.check("mask").formula, found.check("output").formula) == ("k <= q", None)
    found.check("mask").site.condition = None
    assert found.check("mask").formula is None
