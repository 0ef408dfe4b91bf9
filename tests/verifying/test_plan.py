"""What a plan holds once the graph is given away, in which order its checks run, and the copies that they run on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from attn_compiler.passes.recovering import reading
from attn_compiler.passes.writing import buffers
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.verifying import first, interpreting, pairs
from attn_compiler.verifying.interpreting import copied_module, isolated, leaving_no_trace, share_memory
from attn_compiler.verifying.plan import Padded
from attn_compiler.verifying.values import Key, NoValueError
from tests.verifying.planning import (
    LENGTH,
    PADDING,
    SHAPE,
    Planned,
    Tensor,
    causal,
    masked,
    planned,
    plans,
    qkv,
    with_mask,
)

aten = torch.ops.aten


def _causal_in_a_checkpoint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(causal, q, k, v, use_reentrant=False)


def test_graphs_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without attention, and those that a pass failed on."""
    ((plan, _, _),) = plans(torch.sin, torch.randn(3))
    assert plan is None
    monkeypatch.setattr(buffers, "install", None)
    with pytest.warns(AttnCompilerWarning):
        ((plan, _, _),) = plans(causal, *qkv(), strict=False)
    assert plan is None


def test_each_site_has_its_checks_in_order() -> None:
    found = planned(lambda q, k, v: causal(q.sin(), k, v) @ causal(q, k, v).mT, *qkv())
    names = {Key(0, node.name) for node in found.plan.module.graph.nodes}
    assert all(check.needs and check.needs <= names for check in found.plan.checks)
    results = found.found()
    assert [(x.subject, x.skipped, x.formula) for x in results] == [
        ("mask", None, "k <= q"),
        ("output", None, None),
    ] * 2
    assert {result.elements for result in results} == {LENGTH * LENGTH, torch.Size(SHAPE).numel()}
    for result in results[1::2]:
        assert result.error is not None
        assert result.allowed is not None
        assert 0 < result.error <= result.allowed < 1e-4
    plan = planned(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv()).plan
    assert [check.subject for check in plan.checks] == ["output"]


@pytest.mark.parametrize("function", [causal, _causal_in_a_checkpoint])
def test_the_plan_outlives_the_graph(function: Callable[..., Tensor]) -> None:
    """The compiler is free to do what it likes with the graph that it is given."""
    found = planned(function, *qkv(grad=True))
    for module in found.module.modules():
        if isinstance(module, fx.GraphModule):
            module.graph = fx.Graph()
    assert [v.skipped for v in found.found()] == [None, None]


def test_outputs_of_a_body_that_is_given_more_than_the_models_own_are_checked() -> None:
    """Its kernel reads which tokens are padding, of which the model hands on no more than a mask."""

    def function(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return checkpoint(with_mask, q, k, v, real.bool()[:, None, None, :], use_reentrant=False)

    found = planned(
        function, *qkv(grad=True), torch.ones_like(PADDING) - (torch.arange(6) > 3).long(), lowerings=("triton",)
    )
    assert [list(body.given.values()) for body in found.plan.bodies.values() if body.given] == [[Key(1, "l_real_")]]
    assert [(v.subject, v.skipped) for v in found.found()] == [("mask", None), ("output", None)]


def test_a_node_that_means_something_else_after_the_rewriting_is_not_the_same() -> None:
    (body,) = planned(lambda q, k, v: causal((q @ q.mT).softmax(-2) @ v, k, v), *qkv()).plan.bodies.values()
    softmax = {n.name for n in body.rewritten.nodes if "softmax" in n.name}
    assert softmax
    assert not softmax & body.original
    assert {"matmul", "transpose"} & body.original


class _Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(SHAPE))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.copy_(k)
        return causal(q * self.weight, self.keys, v)


def test_inputs_that_the_graph_writes_to_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained parameters are not copied. A graph whose bodies are not known may write to anything."""
    seen: list[Sequence[bool]] = []
    monkeypatch.setattr(interpreting, "isolated", lambda args, shared: seen.append(shared) or isolated(args, shared))
    found = planned(_Cached(), *qkv())
    assert found.plan.may_write == [name == "keys" for name in found.plan.inputs]
    first.run_checks(found.plan, found.args)
    assert seen[0] == [name == "weight" for name in found.plan.inputs]
    unknown = planned(lambda q, k, v: causal(checkpoint(torch.sin, q, use_reentrant=False), k, v), *qkv(grad=True))
    assert all(unknown.plan.may_write)


def test_symbolic_sizes_are_seen_where_they_first_occur() -> None:
    inputs = [*qkv(), torch.ones(2, 6, dtype=torch.int64)]
    for i, x in enumerate(inputs):
        torch._dynamo.mark_dynamic(x, 1 if i == 3 else 2)
    names = [symbol for places in planned(masked, *inputs).plan.symbols.values() for symbol, _ in places]
    assert names
    assert len(names) == len(set(names))


class _Before(nn.Module):
    def forward(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        return mask != 0, mask.sum()


def test_padding_counts_for_nothing_whatever_axes_hold_it_and_whatever_is_in_it() -> None:
    places = {0: (0, 1), 1: (1, 0), 2: (0, 0), 3: (0, 2), 4: (0, 1)}
    padded = Padded(before=fx.symbolic_trace(_Before()), places=places)
    real = torch.tensor([[1, 0], [1, 1], [0, 1]])
    given = [torch.ones(shape) for shape in ((3, 2, 4), (2, 3), (6, 4), (3, 4, 2))]
    found = padded.cleared(dict(enumerate([*given, torch.full((3, 2), torch.nan), torch.ones(3, 2)])), [real])
    expected = [
        real[..., None].expand(3, 2, 4),
        real.t(),
        real.reshape(6, 1).expand(6, 4),
        real[:, None].expand(3, 4, 2),
    ]
    for i, x in enumerate(expected):
        assert torch.equal(found[i], x.float())
    assert torch.equal(found[4].isnan(), real == 1)
    assert torch.equal(found[5], torch.ones(3, 2))


# ---- the run --------------------------------------------------------------------------------------------------------


def test_what_turns_out_to_have_no_value_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise NoValueError("odd")

    monkeypatch.setattr(pairs.MaskCheck, "compare", none)
    assert [x.skipped for x in planned(causal, *qkv()).found()] == ["odd", None]


def test_the_graph_runs_to_its_end_before_a_mismatch_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions that the graph enters, such as autocast, are left again."""
    monkeypatch.setitem(reading.READERS, aten.le.Tensor, reading.READERS[aten.lt.Tensor])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return causal(q, k, v) @ v.mT

    planned(function, *qkv()).mismatch()
    assert not torch.is_autocast_enabled("cpu")


def _of_flag(flag: bool) -> Planned:
    def function(q: Tensor, k: Tensor, v: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag.any(), causal, lambda q, k, v: q + 1, (q, k, v))

    return planned(function, *qkv(), torch.tensor([flag]))


@pytest.mark.parametrize("flag", [True, False])
def test_a_body_that_is_not_run_is_said_to_be_unchecked_and_nothing_is_held(
    monkeypatch: pytest.MonkeyPatch, flag: bool
) -> None:
    copies: list[weakref.ref[Tensor]] = []

    def noted(args: Sequence[Any], shared: Sequence[bool]) -> list[Any]:
        found = isolated(args, shared)
        copies.extend(weakref.ref(x) for x in found)
        return found

    monkeypatch.setattr(interpreting, "isolated", noted)
    found = _of_flag(flag)
    gc.collect()
    gc.disable()
    try:
        results = found.found()
        assert len(copies) >= len(found.args)
        assert [ref() for ref in copies] == [None] * len(copies)
    finally:
        gc.enable()
    why = None if flag else "the first call did not run the graph that it is in"
    assert [v.skipped for v in results] == [why, why]


def _waits_for_a_second_write(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    mask = torch.arange(LENGTH) < length
    length.add_(2)
    mask = (mask & (torch.arange(LENGTH) < length)).expand(LENGTH, LENGTH).clone()
    length.zero_()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    mask.zero_()
    return out


def _is_written_first(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    length.remainder_(torch.tensor(4))
    mask = (torch.arange(LENGTH) < length)[None, :]
    length.zero_()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize(
    ("function", "formula", "after"),
    [(_waits_for_a_second_write, "k + 1 <= length", "None"), (_is_written_first, "k + 1 <= length", "remainder_")],
)
def test_values_are_those_of_their_time(function: Callable[..., Tensor], formula: str, after: str) -> None:
    """A check that has to wait for the last write still gets what the tensors held before each of them."""
    found = planned(function, *qkv(), torch.tensor(3))
    (loaded,) = (key for key in found.plan.checks[0].needs if "length" in key.name)
    assert loaded.copied
    assert after in str(loaded.after)
    found.args[next(i for i, x in enumerate(found.args) if x.dim() == 0)].fill_(3)
    mask, output = found.found()
    assert (mask.skipped, output.skipped) == (None, None)
    assert mask.formula == formula


# ---- copies ---------------------------------------------------------------------------------------------------------


def _at(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def test_copies_have_the_elements_and_strides_and_aliases_and_memory_of_their_own() -> None:
    base, other, weight = torch.randn(4, 6), torch.zeros(2), nn.Parameter(torch.ones(3))
    x = base.t()[1:, ::2]
    given = [x, base, other, weight, torch.empty(0, 3), torch.empty(2, 0), torch.eye(3).to_sparse(), 3, None, "x"]
    copies = isolated(given, [x is weight for x in given])
    for copy, own in zip(copies[:6], given[:6], strict=True):
        assert (copy.shape, copy.stride(), copy.storage_offset()) == (own.shape, own.stride(), own.storage_offset())
        torch.testing.assert_close(copy, own.detach(), rtol=0, atol=0)
    assert [_at(copy) == _at(own) for copy, own in zip(copies[:4], given[:4], strict=True)] == [False] * 3 + [True]
    assert _at(copies[0]) == _at(copies[1]) != _at(copies[2])
    assert not copies[3].requires_grad
    torch.testing.assert_close(copies[6].to_dense(), torch.eye(3))
    assert copies[7:] == [3, None, "x"]


@pytest.mark.parametrize(
    ("places", "written", "expected"),
    [((0, 1), (True, False), True), ((0, 1), (False, True), True), ((0, 1), (False, False), False),
     ((0, 2), (True, True), False), ((3, 3), (True, True), False), ((4, 4), (True, True), False)],
)  # fmt: skip
def test_floats_that_share_memory_that_is_written(
    places: tuple[int, int], written: tuple[bool, bool], expected: bool
) -> None:
    x = torch.ones(4)
    values = (x, x[1:], torch.ones(4), torch.arange(4), 7)
    assert share_memory([values[i] for i in places], written) == expected


def test_random_numbers_and_grad_mode_are_as_before() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    before = generator.get_state(), torch.get_rng_state()

    def draw() -> None:
        with leaving_no_trace([generator], [torch.device("cpu")]) as drew:
            assert not drew()
            torch.rand(3, generator=generator)
            assert drew()
            torch.rand(3)
            assert not torch.is_grad_enabled()
            raise RuntimeError("odd")

    with pytest.raises(RuntimeError, match="odd"):
        draw()
    assert torch.is_grad_enabled()
    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("given", [False, True])
def test_modules_are_copied_with_their_bodies(given: bool) -> None:
    """A given graph takes the place of the copy."""
    root, graph = nn.Module(), fx.Graph()
    root.body = fx.symbolic_trace(lambda x: x.sin())
    x = graph.placeholder("x")
    graph.get_attr("body")
    graph.output(graph.call_function(torch.cos, (x,)))
    outer, other = fx.GraphModule(root, graph), fx.symbolic_trace(lambda x: x.tan()).graph
    copy = copied_module(outer, {outer.body: other} if given else {})
    assert copy.graph is not outer.graph
    assert copy.body is not outer.body
    outer.body.graph = fx.Graph()
    assert [n.target for n in copy.body.graph.nodes if n.op == "call_method"] == ["tan" if given else "sin"]
