"""Padding as a graph has it at run time: taken out, packed, and of batches before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_compiler.passes.unpad import batches_before, outcome, packing
from attn_compiler.passes.unpad.outcome import Packed
from attn_compiler.passes.unpad.unpadding import MOST_CODES, Batch, PackedCode, PackedWork, Unpadded, in_steps
from attn_compiler.reporting.facts import LITTLE_SAVED, Steps
from attn_compiler.torch_private import compat as torch_compat, packed as torch_packed
from attn_compiler.torch_private.packed import Compilation, GuardedError, Guards
from tests.passes.unpad import encoder

REAL = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])


class Asking:
    """Guards of codes that serve up to a number of tokens."""

    def __init__(self, most: int) -> None:
        self.most = most

    def hold(self, number: int, args: Sequence[Any]) -> bool:
        return number <= self.most


def unpadded(
    made: list[int], steps: Steps, *, most: int, fact: bool = True, work: PackedWork | None = None
) -> Unpadded:
    def code(up_to: int) -> PackedCode:
        return PackedCode(run=lambda *args: ("packed", up_to, len(args)), guards=cast(Guards, Asking(up_to)))

    def again(number: int) -> PackedCode:
        made.append(number)
        return code(number)

    def before(real: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.stack((real.sum(), torch.tensor(int(fact)))), real

    return Unpadded(
        first=code(most),
        again=again,
        before=before,
        places=Batch.from_mask,
        facts=("it holds",),
        original=lambda: lambda *args: ("original", len(args)),
        steps=steps,
        work=work,
        sizes=lambda args: args[0].shape,
    )


def test_where_the_real_tokens_are() -> None:
    found = Batch.from_mask(REAL).first(5)
    assert found.tokens.tolist() == [0, 2, 6, 7, 8]
    assert found.rows.tolist() == [0, 0, 2, 2, 2]
    assert found.positions.tolist() == [0, 2, 0, 1, 2]
    assert found.begins.tolist() == [0, 0, 2, 2, 2]
    assert found.ends.tolist() == [2, 2, 5, 5, 5]
    assert found.starts.tolist() == [0, 2, 2, 5]
    like = Batch.like(5, 3, torch.device("cpu"))
    assert [(x.shape, x.dtype) for x in like.inputs] == [(x.shape, x.dtype) for x in found.inputs]


def test_padding_stands_behind_the_tokens() -> None:
    """In order, each position once, and it sees nothing."""
    found = Batch.from_mask(REAL)
    assert found.tokens.tolist() == [0, 2, 6, 7, 8, 1, 3, 4, 5]
    assert found.rows.tolist() == [0, 0, 2, 2, 2, 0, 1, 1, 1]
    assert found.begins.tolist() == [0, 0, 2, 2, 2, 5, 5, 5, 5]
    assert found.ends.tolist() == [2, 2, 5, 5, 5, 5, 5, 5, 5]


def test_any_mask_is_ordered_as_by_a_stable_sort() -> None:
    generator = torch.Generator().manual_seed(3)
    for batch, length in ((1, 2), (5, 1), (7, 33), (64, 19)):
        real = torch.rand(batch, length, generator=generator) < 0.4
        found, flat = Batch.from_mask(real), real.flatten()
        assert torch.equal(found.tokens, torch.argsort(~flat, stable=True))
        assert torch.equal(found.starts, torch.cat((torch.zeros(1).long(), real.sum(1).cumsum(0))))
        assert torch.equal(found.rows * length + found.positions, found.tokens)
        assert torch.equal((found.ends - found.begins)[: int(flat.sum())], real.sum(1)[found.rows][: int(flat.sum())])


def test_no_view_of_the_mask_is_asked_for() -> None:
    found = Batch.from_mask(torch.stack((REAL, REAL), 2)[..., 0].t().contiguous().t())
    assert found.tokens[:5].tolist() == [0, 2, 6, 7, 8]


def test_the_packed_graph_is_given_the_batch() -> None:
    steps = Steps()
    assert unpadded([], steps, most=9)(REAL) == ("packed", 9, 8)
    assert [(step.fill, step.failed) for step in steps.last] == [(5 / 9, ())]


def test_the_original_runs_where_a_fact_fails_or_nothing_is_left() -> None:
    steps = Steps()
    assert unpadded([], steps, most=9, fact=False)(REAL) == ("original", 1)
    assert unpadded([], steps, most=9)(REAL & False) == ("original", 1)
    assert [step.failed for step in steps.last] == [("it holds",), ("2 tokens are real",)]


def test_padding_that_is_packed_is_no_key() -> None:
    packed = torch.tensor([[False, True, True, True], [True, True, True, True]])
    real = torch.tensor([[False, False, True, True], [True, True, True, True]])
    found = Batch.from_mask(packed, real).first(7)
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert found.starts.tolist() == [0, 3, 7]
    assert found.begins.tolist() == [1, 1, 1, 3, 3, 3, 3]
    assert found.ends.tolist() == [3, 3, 3, 7, 7, 7, 7]


def test_a_graph_that_is_never_packed_is_asked_now_and_then() -> None:
    """Each question waits for the device."""
    steps, asked = Steps(), []
    function = unpadded([], steps, most=9, fact=False)
    before = function._before
    function._before = lambda *args: asked.append(None) or before(*args)  # type: ignore[func-returns-value]
    for _ in range(40):
        assert function(REAL) == ("original", 1)
    assert len(asked) == 16 + 1
    assert len(unpadded_steps := steps.last) == 16
    assert all(step.failed for step in unpadded_steps)


def test_a_batch_that_saves_little_runs_padded() -> None:
    """It is asked again unless no batch of its sizes could save more. 16 such batches do not stop the questions."""
    steps, asked = Steps(), []
    function = unpadded([], steps, most=10**6, work=PackedWork(products=10**6, pairs=0, sites=1))
    before = function._before
    function._before = lambda *args: asked.append(None) or before(*args)  # type: ignore[func-returns-value]
    for _ in range(3):
        assert function(REAL) == ("original", 1)
    assert len(asked) == 1
    full = torch.ones(8, 64, dtype=torch.bool)
    for _ in range(20):
        assert function(full) == ("original", 1)
    assert len(asked) == 21
    assert {step.failed for step in steps.last} == {(LITTLE_SAVED,)}
    full[:, 32:] = False
    assert function(full)[0] == "packed"
    assert steps.last[-1].failed == ()


def test_padding_is_worth_the_work_of_its_tokens() -> None:
    work = PackedWork(products=10**6, pairs=100, sites=6)
    saves = [number for number in range(1, 1025) if work.is_saved(number, 1024, 16)]
    # The fewer tokens, the more is saved; nothing is without padding, nor with little of it.
    assert saves == list(range(1, len(saves) + 1))
    assert 512 < len(saves) < 1024 * 31 / 32
    less = dataclasses.replace(work, products=10**4)
    more = [dataclasses.replace(work, pairs=10**4), dataclasses.replace(work, sites=3)]
    assert not less.is_saved(len(saves), 1024, 16)
    assert all(one.is_saved(len(saves) + 1, 1024, 16) for one in more)
    assert not work.is_saved(len(saves), 1024, 32)


def test_code_is_made_again_for_numbers_that_no_code_serves() -> None:
    made: list[int] = []
    function = unpadded(made, Steps(), most=2)
    assert function(REAL) == ("packed", 5, 8)
    assert function(REAL) == ("packed", 5, 8)
    assert made == [5]
    for number in range(6, 6 + MOST_CODES):
        function(torch.ones(1, number, dtype=torch.bool))
    assert len(made) == MOST_CODES - 1
    assert function(torch.ones(1, 99, dtype=torch.bool)) == ("original", 1)


def test_lengths_come_in_steps() -> None:
    """Few of them occur, and little is filled up."""
    assert len({in_steps(number) for number in range(8193, 16385)}) == 32
    for number in (*range(2, 200), 8191, 8192, 8193, 16384):
        assert number <= in_steps(number) <= max(number, number * 33 / 32)
        assert in_steps(in_steps(number)) == in_steps(number)


def test_a_batch_is_filled_up_to_a_step_and_no_further_than_its_positions() -> None:
    function = unpadded([], Steps(), most=999)
    assert function._length(129, 200) == 129
    function._has_steps = True
    assert function._length(129, 200) == 132
    assert function._length(129, 130) == 130


def test_a_batch_that_runs_padded_is_asked_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has work by then."""
    order: list[str] = []
    monkeypatch.setattr(
        batches_before, "Arriving", lambda told: order.append("sent") or SimpleNamespace(are_there=bool)
    )
    function = unpadded([], Steps(), most=9)
    function._batches._are_awaited = True
    before, full = function._before, REAL | True
    function._before = lambda *args: order.append("asked") or before(*args)  # type: ignore[func-returns-value]
    function._compile_original = lambda: lambda *args: order.append("ran")
    assert [function(full) is None for _ in range(3)] == [False, False, True]
    assert order == ["asked", "asked", "ran", "asked", "sent"]


def mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def test_guards_of_an_own_size_are_taken_and_asked() -> None:
    of = mode()
    size = torch_packed.own_size(of, hint=101, most=500)
    assert bool(size > 50)
    assert len(of.shape_env.guards) == 1
    guards = torch_packed.taken_guards(size, [])
    assert of.shape_env.guards == []
    assert guards.hold(51, [])
    assert not guards.hold(50, [])


def test_a_size_that_is_fixed_serves_one_number() -> None:
    size = torch_packed.own_size(mode(), hint=101, most=500)
    assert bool(size == 101)
    guards = torch_packed.taken_guards(size, [])
    assert guards.hold(101, [])
    assert not guards.hold(102, [])


def test_guards_with_sizes_of_inputs_are_asked_of_the_inputs() -> None:
    of = mode()
    size, other = (torch_packed.own_size(of, hint=hint, most=None) for hint in (101, 200))
    assert bool(size < other)
    with of:
        given = torch.empty(3, other)
    guards = torch_packed.taken_guards(size, [7, given])
    assert guards.hold(5, [7, torch.empty(3, 6)])
    assert not guards.hold(6, [7, torch.empty(3, 6)])


def test_a_guard_of_what_is_no_input_is_an_error() -> None:
    of = mode()
    size, other = (torch_packed.own_size(of, hint=hint, most=None) for hint in (101, 200))
    assert bool(size < other)
    with pytest.raises(ValueError, match="asks for"):
        torch_packed.taken_guards(size, [])


def test_what_is_known_of_its_range_asks_nothing() -> None:
    of = mode()
    size = torch_packed.own_size(of, hint=101, most=500)
    assert bool(size >= 2)
    assert bool(size <= 500)
    assert of.shape_env.guards == []


def test_guards_of_a_graph_that_was_given_up_are_forgotten() -> None:
    of = mode()
    size = torch_packed.own_size(of, hint=101, most=500)
    with of:
        given = torch.empty(size)
    assert bool(size > 50)
    torch_packed.forget_guards([given])
    assert of.shape_env.guards == []


def test_a_copy_of_a_graph_shares_parameters_and_no_node() -> None:
    gm = fx.symbolic_trace(torch.nn.Linear(2, 2))
    twin = torch_packed.copied(gm)
    assert twin.weight is gm.weight
    assert not set(twin.graph.nodes) & set(gm.graph.nodes)


def test_a_copy_of_dynamos_graph_says_where_parameters_are_from() -> None:
    gm = fx.symbolic_trace(torch.nn.Linear(2, 2))
    gm._param_name_to_source = {"weight": ConstantSource("weight")}
    twin = torch_packed.copied(gm)
    torch_compat.add_buffer(twin, "kept", torch.zeros(1))
    assert set(twin._param_name_to_source) == {"weight", "kept"}
    assert set(gm._param_name_to_source) == {"weight"}


def test_outside_of_a_compilation_nothing_is_entered() -> None:
    with Compilation.current().enter():
        pass
    assert issubclass(GuardedError, Exception)


# What is told of a packed graph, and fake inputs for another number of tokens.
def _packed(mode: FakeTensorMode | None = None, **changed: Any) -> Packed:
    mode = mode or FakeTensorMode(shape_env=ShapeEnv())
    like = Batch(*(mode.from_tensor(x, static_shapes=True) for x in Batch.like(2, 3, torch.device("cpu")).inputs))
    given: dict[str, Any] = {
        "facts": (),
        "zeroed": ("output 0",),
        "places": {},
        "writes": False,
        "dropout": False,
        "before": None,
        "original": None,
        "fakes": (),
        "inputs": outcome.fake_inputs(mode, 30, 7, like, 0),
        "mode": mode,
        "most": 30,
        "work": PackedWork(products=1, pairs=1, sites=1),
    }
    return Packed(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [({}, ()), ({"dropout": True}, ("statistically equal",)), ({"zeroed": ()}, ("nothing visible changes",))],
)
def test_people_are_told_of_what_differs(changed: dict[str, Any], words: tuple[str, ...]) -> None:
    (*notes, of_others) = _packed(**changed).row().notes
    assert "a batch that is not packed" in of_others
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_the_number_of_tokens_is_a_size_of_its_own() -> None:
    packed = _packed()
    number, tokens, rows, positions, begins, ends, starts = packed.inputs
    assert isinstance(number, torch.SymInt)
    assert {str(x.shape[0]) for x in (tokens, rows, positions, begins, ends)} == {str(number)}
    assert [x.dtype for x in (tokens, begins, starts)] == [torch.int64, torch.int32, torch.int64]
    assert starts.shape == (4,)


def test_another_number_of_tokens_is_another_size() -> None:
    packed = _packed()
    further = packed.further(19)
    assert str(further[0]) != str(packed.inputs[0])
    assert further[0].node.hint == 19
    assert str(further[1].shape[0]) == str(further[0])
    assert further[-1].shape == packed.inputs[-1].shape


def test_the_work_of_a_token_is_that_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    real = packing._work
    monkeypatch.setattr(packing, "_work", lambda *given: found.append(real(*given)) or found[-1])
    encoder.check(encoder.Encoder())
    # Two layers of 2 heads: q, k and v are one product, and what comes out of the heads is another.
    assert [(x.products, x.pairs, x.sites) for x in found] == [(2 * 4 * encoder.WIDTH**2, 2 * 2 * encoder.WIDTH, 2)]
