"""A lowering's nodes are computed as they are made."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from attn_compiler.lowerings.choice.timed.eager import EagerEmitter
from attn_compiler.spec.target import Target


def test_nodes_hold_results_and_what_sites_share_is_made_once() -> None:
    emitter = EagerEmitter(Target.fake(device="cpu"))
    x = emitter.given("x", torch.arange(3.0))
    doubled = emitter.once("doubled", lambda: emitter.call(torch.mul, x, 2))
    assert emitter.once("doubled", lambda: x) is doubled
    assert emitter.value(emitter.call(torch.cat, [x, doubled])).tolist() == [0, 1, 2, 0, 2, 4]
    assert set(x.users) == {doubled, *doubled.users}


def test_a_bool_mask_is_added_as_zero_and_minus_infinity() -> None:
    emitter = EagerEmitter(Target.fake(device="cpu"))
    mask = emitter.given("mask", torch.tensor([True, False]))
    added = emitter.shared_mask(mask, torch.bfloat16)
    assert emitter.value(added).tolist() == [0, -torch.inf]
    assert emitter.value(added).dtype == torch.bfloat16
    assert emitter.shared_mask(mask, torch.bfloat16) is added
    assert emitter.shared_mask(added, torch.bfloat16) is added


def test_what_was_computed_is_forgotten_but_for_operands_and_what_sites_share() -> None:
    emitter = EagerEmitter(Target.fake(device="cpu"))
    x = emitter.given("x", torch.arange(3.0))
    shared = emitter.once("shared", lambda: emitter.call(torch.mul, emitter.call(torch.add, x, 1), 2))
    emitter.call(torch.neg, emitter.call(torch.sub, shared, x))
    emitter.forget()
    assert [node.name for node in emitter.graph.nodes] == ["x", "add", "mul"]
    assert emitter.value(shared).tolist() == [2, 4, 6]


def test_tensors_that_are_let_go_need_no_collector() -> None:
    emitter = EagerEmitter(Target.fake(device="cpu"))
    x = emitter.given("x", torch.arange(3.0))
    shared = emitter.once("shared", lambda: emitter.call(torch.mul, x, 2))
    held = [weakref.ref(emitter.value(node)) for node in (x, shared, emitter.call(torch.neg, shared))]
    gc.disable()
    try:
        assert all(ref() is not None for ref in held)
        emitter.let_go()
        assert all(ref() is None for ref in held)
    finally:
        gc.enable()


def test_nothing_lives_from_call_to_call() -> None:
    with pytest.raises(TypeError, match="amax"):
        EagerEmitter(Target.fake(device="cpu")).buffer("amax", (1,))
