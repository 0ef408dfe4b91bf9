"""What attention in plain PyTorch takes, it computes: every dtype and change that its `Takes` lists, run against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.plain import takes
from attn_compiler.lowerings.shared.parts import score_changes
from attn_compiler.lowerings.shared.parts.site_parts import ADDED, MASKING
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.cases import Case
from tests.lowerings.emitting import arguments, emit

CPU = Target.current("cpu")
DTYPES = {name: getattr(torch, name) for name in takes.MATH.dtypes}
#: how a case is told of a change that is taken
CHANGES = {Softcap: {"softcap": 5.0}, Sinks: {"sinks": True}}


def test_it_takes_every_part_and_runs_everywhere() -> None:
    for taken in (takes.MATH, takes.REFERENCE):
        assert taken.parts == MASKING | ADDED
        assert (taken.sms, taken.head_dims, taken.tensors) == (None, None, None)
    assert set(takes.MATH.changes) == set(CHANGES)


def test_the_reference_takes_more_shapes_and_no_dropout() -> None:
    assert dataclasses.replace(takes.REFERENCE, any_shape=False, dropout=True) == takes.MATH
    dropout, empty = (cases.build(Case(name="taken", **{k: x})).spec for k, x in (("dropout_p", 0.5), ("seqlen_kv", 0)))
    refusals = [[bool(by_name(name).why_not(spec, CPU)) for spec in (dropout, empty)] for name in ("math", "reference")]
    assert refusals == [[False, True], [True, False]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["math", "reference"])
def test_what_is_taken_is_computed(name: str, change: type, dtype: str) -> None:
    case = Case(name="taken", seqlen_q=9, seqlen_kv=13, head_dim=16, dtype=DTYPES[dtype], **CHANGES[change])
    inputs = cases.build(case)
    lowering = by_name(name)
    assert lowering.why_not(inputs.spec, CPU) == []
    module = emit(lowering, inputs)
    numerics.assert_within_rule(numerics.with_gradients(lambda given: module(*arguments(given)), inputs), inputs)


def test_each_change_of_each_score_is_taken() -> None:
    assert set(score_changes.KINDS) <= set(takes.MATH.changes)
