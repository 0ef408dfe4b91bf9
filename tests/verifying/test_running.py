"""What a check runs: the site as it is read, its values, and what is interpreted of it."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from attn_compiler.lowerings import score_changes
from attn_compiler.lowerings.shared.parts.score_changes import Form
from attn_compiler.passes.recovering import reading
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.spec.scores import Pointwise
from attn_compiler.verifying import interpreting, pairs, running
from attn_compiler.verifying.interpreting import Noise, copied_module, is_trained_parameter, isolated, leaving_no_trace
from attn_compiler.verifying.ranks import AsRead
from attn_compiler.verifying.values import NoValueError, Values
from tests.verifying.planning import LENGTH, SHAPE, Tensor, causal, planned, qkv

aten = torch.ops.aten


def test_results_come_in_the_order_of_the_plan() -> None:
    found = planned(lambda q, k, v: causal(q.sin(), k, v) @ causal(q, k, v).mT, *qkv())
    results = running.run_checks(found.plan, found.args).found
    assert [result.subject for result in results] == ["mask", "output"] * 2
    assert [result.skipped for result in results] == [None] * 4
    assert [result.formula for result in results] == ["k <= q", None] * 2
    assert {result.elements for result in results} == {LENGTH * LENGTH, torch.Size(SHAPE).numel()}
    for result in results[1::2]:
        assert result.error is not None
        assert result.allowed is not None
        assert 0 < result.error <= result.allowed < 1e-4


def test_what_turns_out_to_have_no_value_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise NoValueError("odd")

    monkeypatch.setattr(pairs.MaskCheck, "compare", none)
    found = planned(causal, *qkv())
    mask, output = running.run_checks(found.plan, found.args).found
    assert mask.skipped == "odd"
    assert output.skipped is None


def test_the_graph_runs_to_its_end_before_a_mismatch_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions that the graph enters, such as autocast, are left again."""
    monkeypatch.setitem(reading.READERS, aten.le.Tensor, reading.READERS[aten.lt.Tensor])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return causal(q, k, v) @ v.mT

    found = planned(function, *qkv())
    with pytest.raises(VerificationMismatch):
        running.run_checks(found.plan, found.args)
    assert not torch.is_autocast_enabled("cpu")


def test_a_body_that_is_not_run_is_said_to_be_unchecked() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag.any(), causal, lambda q, k, v: q + 1, (q, k, v))

    found = planned(function, *qkv(), torch.tensor([False]))
    assert [v.skipped for v in running.run_checks(found.plan, found.args).found] == [
        "the first call did not run the graph that it is in"
    ] * len(found.plan.checks)
    found = planned(function, *qkv(), torch.tensor([True]))
    assert [v.skipped for v in running.run_checks(found.plan, found.args).found] == [None, None]


@pytest.mark.parametrize("flag", [True, False])
def test_nothing_is_held_afterwards(monkeypatch: pytest.MonkeyPatch, flag: bool) -> None:
    copies: list[weakref.ref[Tensor]] = []
    real = interpreting.isolated

    def isolated(args: Sequence[Any], shared: Sequence[bool]) -> list[Any]:
        found = real(args, shared)
        copies.extend(weakref.ref(x) for x in found)
        return found

    def function(q: Tensor, k: Tensor, v: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag.any(), causal, lambda q, k, v: q + 1, (q, k, v))

    monkeypatch.setattr(interpreting, "isolated", isolated)
    found = planned(function, *qkv(), torch.tensor([flag]))
    gc.collect()
    gc.disable()
    try:
        running.run_checks(found.plan, found.args)
        assert len(copies) >= len(found.args)
        assert [ref() for ref in copies] == [None] * len(copies)
    finally:
        gc.enable()


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q * self.weight, k, v)


def test_trained_parameters_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bool]] = []
    real = interpreting.isolated
    monkeypatch.setattr(interpreting, "isolated", lambda args, shared: seen.append(shared) or real(args, shared))
    found = planned(_Scaled(), *qkv())
    running.run_checks(found.plan, found.args)
    assert seen[0] == [isinstance(x, nn.Parameter) for x in found.args]
    assert any(seen[0])


def test_values_are_those_of_their_time() -> None:
    """A check that has to wait for the second write still gets what the tensors held before each of them."""

    def function(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
        mask = torch.arange(LENGTH) < length
        length.add_(2)
        mask = (mask & (torch.arange(LENGTH) < length)).expand(LENGTH, LENGTH).clone()
        length.zero_()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mask.zero_()
        return out

    found = planned(function, *qkv(), torch.tensor(3))
    (loaded,) = (key for key in found.plan.checks[0].needs if "length" in key.name)
    assert loaded.copied
    results = running.run_checks(found.plan, found.args).found
    assert [result.skipped for result in results] == [None, None]
    assert results[0].formula == "k + 1 <= length"


def test_a_value_is_recorded_after_what_writes_it() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, length: Tensor, other: Tensor) -> Tensor:
        length.remainder_(other)
        mask = (torch.arange(LENGTH) < length)[None, :]
        length.zero_()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    found = planned(function, *qkv(), torch.tensor(7), torch.tensor(4))
    (loaded,) = (key for key in found.plan.checks[0].needs if "length" in key.name)
    assert "remainder" in str(loaded.after)
    assert loaded.copied
    assert [result.skipped for result in running.run_checks(found.plan, found.args).found] == [None, None]


# An attention as it was read, pair by pair, is the model's own.
_EXACT = 1e-12


def _read(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, /, **changed: Any) -> AsRead:
    """What is read off the function at a length of LENGTH. q, k, v: of the attention that is computed."""
    own = [x[:, :, :LENGTH] for x in (q, k, v)]
    site = planned(function, *own).check("output").site
    assert site.spec is not None
    return AsRead(
        **{
            "site": site,
            "spec": site.spec,
            "values": Values(bodies={}),
            "q": q,
            "k": k,
            "v": v,
            "sinks": None,
            "positions": torch.arange(q.shape[2]),
            "loads": {},
            "score_loads": {},
            **changed,
        }
    )


def _softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = torch.arange(q.shape[2])
    scores = torch.tanh(q @ k.mT * 0.3 / 2.0) * 2.0
    return scores.masked_fill(count > count[:, None], -torch.inf).softmax(-1) @ v


def _of_flag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = torch.arange(q.shape[2])
    bias = (count - count[:, None]).to(q.dtype) * 0.25
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


@pytest.mark.parametrize("function", [causal, _of_flag, _softcap, _distance, _shared_heads])
def test_it_is_the_model_s_own(function: Callable[..., Tensor]) -> None:
    q, k, v = qkv(dtype=torch.float64)
    k, v = (x[:, :2].contiguous() if function is _shared_heads else x for x in (k, v))
    found = _read(function, q, k, v)
    assert (found.run() - function(q, k, v)).abs().max() < _EXACT
    assert bool(found.rows().all())


class _Halved(Pointwise):
    """s -> s / 2"""

    number = 2.0


def test_a_change_of_any_kind_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Form(name="halved", apply=lambda call, x, by: call(torch.div, x, by), slope=lambda x, by: x)
    monkeypatch.setitem(score_changes.FORMS, _Halved, form)
    q, k, v = qkv(dtype=torch.float64)
    plain = _read(_distance, q, k, v)
    halved = dataclasses.replace(plain.spec, score=dataclasses.replace(plain.spec.score, changes=(_Halved(),)))
    found = dataclasses.replace(plain, spec=halved)
    assert (found.run() - _distance(q / 2, k, v)).abs().max() < _EXACT
    assert (found.run() - plain.run()).abs().max() > _EXACT


@pytest.mark.parametrize("function", [causal, _of_flag, _softcap, _distance])
def test_some_queries_of_a_longer_sequence(function: Callable[..., Tensor]) -> None:
    q, k, v = qkv(dtype=torch.float64, shape=(2, 4, 2 * LENGTH, 8))
    mine = torch.tensor([3, 4, 5, 11, 10, 0])
    found = _read(function, q, k, v, q=q[:, :, mine], positions=mine)
    assert (found.run() - function(q, k, v)[:, :, mine]).abs().max() < _EXACT


def test_a_row_without_keys_is_zero_and_counts_for_nothing() -> None:
    q, k, v = qkv(dtype=torch.float64)
    found = _read(causal, q, k, v, positions=torch.arange(LENGTH) - 1)
    assert not bool(found.run()[:, :, 0].any())
    assert found.rows()[0, 0, :, 0].tolist() == [False, *[True] * (LENGTH - 1)]


def test_sinks_take_their_share() -> None:
    q, k, v = qkv(dtype=torch.float64)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    found = _read(causal, q, k, v, sinks=sinks).run()
    count = torch.arange(LENGTH)
    scores = (q @ k.mT / 8**0.5).masked_fill(count > count[:, None], -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(2, -1, LENGTH, 1)
    wanted = torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v
    assert (found - wanted).abs().max() < _EXACT


def test_the_steps_are_rounded_as_the_model_s_are_and_not_where_a_dtype_is_given() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    read = _read(causal, q, k, v)
    wanted = causal(*(x.double() for x in (q, k, v)))
    assert read.run().dtype == torch.bfloat16
    assert (read.run(torch.float64) - wanted).abs().max() < _EXACT
    off = float((read.run().double() - wanted).abs().max())
    assert 1e-4 < off < 5e-2
    noisy = read.run(torch.float64, Noise(seed=0))
    assert 1e-4 < float((noisy - wanted).abs().max()) < 0.2


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_copies_have_the_elements_and_strides_and_memory_of_their_own() -> None:
    x = torch.randn(4, 6).t()[1:, ::2]
    (copy,) = isolated([x], [False])
    assert (copy.shape, copy.stride(), copy.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
    torch.testing.assert_close(copy, x, rtol=0, atol=0)
    assert not _share(copy, x)


def test_aliases_stay_aliases() -> None:
    whole = torch.zeros(4, 4)
    other = torch.zeros(4, 4)
    a, b, c = isolated([whole, whole[1:], other], [False] * 3)
    a.add_(1)
    assert b.tolist() == [[1.0] * 4] * 3
    assert not c.any()
    assert not whole.any()


def test_empty_tensors_are_no_aliases_of_each_other() -> None:
    a, b = isolated([torch.empty(0, 3), torch.empty(2, 0)], [False] * 2)
    assert (a.shape, b.shape) == ((0, 3), (2, 0))


def test_what_is_shared_is_the_same_memory_without_gradient() -> None:
    weight = nn.Parameter(torch.ones(3))
    (copy,) = isolated([weight], [True])
    assert _share(copy, weight)
    assert not copy.requires_grad


def test_what_is_no_tensor_goes_along() -> None:
    assert isolated([3, None, "x"], [False] * 3) == [3, None, "x"]


def test_sparse_tensors_are_copied_too() -> None:
    x = torch.eye(3).to_sparse()
    (copy,) = isolated([x], [False])
    torch.testing.assert_close(copy.to_dense(), x.to_dense())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (nn.Parameter(torch.ones(1)), True),
        (nn.Parameter(torch.ones(1), requires_grad=False), False),
        (torch.ones(1, requires_grad=True), False),
        (3, False),
    ],
)
def test_is_trained_parameter(value: object, expected: bool) -> None:
    assert is_trained_parameter(value) is expected


def test_random_numbers_and_grad_mode_are_as_before() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    before = generator.get_state(), torch.get_rng_state()

    def draw() -> None:
        with leaving_no_trace([generator], [torch.device("cpu")]):
            torch.rand(3)
            torch.rand(3, generator=generator)
            assert not torch.is_grad_enabled()
            raise RuntimeError("odd")

    with pytest.raises(RuntimeError, match="odd"):
        draw()
    assert torch.is_grad_enabled()
    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = fx.symbolic_trace(lambda x: x.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _outer() -> fx.GraphModule:
    module = _Outer()
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.get_attr("body")
    graph.output(graph.call_function(torch.cos, (x,)))
    return fx.GraphModule(module, graph)


def test_modules_are_copied_with_their_bodies() -> None:
    outer = _outer()
    copy = copied_module(outer, {})
    assert isinstance(outer.body, fx.GraphModule)
    assert copy.graph is not outer.graph
    assert copy.body is not outer.body
    outer.body.graph = fx.Graph()
    assert [n.target for n in copy.body.graph.nodes if n.op == "call_method"] == ["sin"]


def test_a_given_graph_takes_the_place_of_the_copy() -> None:
    outer = _outer()
    given = fx.symbolic_trace(lambda x: x.tan()).graph
    assert isinstance(outer.body, fx.GraphModule)
    copy = copied_module(outer, {outer.body: given})
    assert copy.body.graph is given
