"""One rank that has the whole sequence: what holds, and what is told where it does not. Several: tests/context_parallel."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.context_parallel.layout import Layout
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting.verifications import Verification
from attn_compiler.verifying import running
from attn_compiler.verifying.ranks import Ranks, WholeLoads
from attn_compiler.verifying.shared import SharedSite
from attn_compiler.verifying.values import Values
from tests.verifying.planning import LENGTH, SHAPE, Planned, masked, planned, qkv

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
    check.shared = SharedSite(
        site=check.site,
        spec=check.site.spec,
        body=check.body,
        new_out=check.new_out,
        whole=WholeLoads(body=check.body, nodes=nodes, axes={mask: 1}),
        ranks=ranks(layout=Layout(size=1, balanced=False), rank=0, group=""),
    )
    check.find_needs(Values(bodies=found.plan.mirrors))
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
    assert check.shared is not None
    spec = check.shared.spec
    score = dataclasses.replace(spec.score, scale=2 * spec.score.scale)
    check.shared = dataclasses.replace(check.shared, spec=dataclasses.replace(spec, score=score))
    with pytest.raises(VerificationMismatch, match="attention as it was read"):
        _output(found)


def test_what_comes_after_goes_on_with_the_attention_over_the_whole_sequence() -> None:
    found = _planned(_Alone)
    check = found.check("output")
    assert check.shared is not None
    other = qkv()[0].new_full(SHAPE, 0.25)

    class _Whole(_Alone):
        def whole(self, x: torch.Tensor, axis: int) -> torch.Tensor:
            return torch.full_like(x, 0.25) if x.is_floating_point() else x

    ranks = _Whole(layout=Layout(size=1, balanced=False), rank=0, group="")
    check.shared = dataclasses.replace(check.shared, ranks=ranks)
    # The rewritten graph is given the same values, so that nothing differs.
    check.new_out = check.shared.new_out
    graph = check.new_out.graph
    with graph.inserting_after(check.new_out):
        made = graph.call_function(torch.full_like, (check.new_out, 0.25))
    check.shared = dataclasses.replace(check.shared, new_out=made)
    check.find_needs(Values(bodies=found.plan.mirrors))
    (out,) = running.run_checks(found.plan, found.args).ran.outs
    assert torch.allclose(out, other)
