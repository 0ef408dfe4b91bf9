from __future__ import annotations

import dataclasses
from typing import cast

import pytest
from torch import fx

from attn_compiler.lowerings import Emitter, Operands, by_name
from attn_compiler.spec.target import Target
from tests import cases
from tests.cases import BY_NAME
from tests.lowerings.specs import UNLISTED

UNTOUCHED = by_name("untouched")


def test_takes_anything_anywhere() -> None:
    spec = cases.build(BY_NAME["everything"]).spec
    unlisted = dataclasses.replace(spec, mask=UNLISTED, returns_weights=True)
    for target in (Target.fake(), Target.fake(device="cpu"), Target.fake(sm=0)):
        assert UNTOUCHED.unavailable(target) == []
        assert UNTOUCHED.why_not(unlisted, target) == []


def test_asks_for_no_layout_and_emits_nothing() -> None:
    spec = cases.build(BY_NAME["plain"]).spec
    demand = UNTOUCHED.demand(spec)
    assert (demand.last_stride_one, demand.alignment, demand.zero_strides) == (False, 1, True)
    node = fx.Graph().placeholder("q")
    with pytest.raises(TypeError, match="never emitted"):
        UNTOUCHED.emit(cast("Emitter", None), spec, Operands(q=node, k=node, v=node))
    with pytest.raises(TypeError, match="gives no lse"):
        UNTOUCHED.emit_with_lse(cast("Emitter", None), spec, Operands(q=node, k=node, v=node))
