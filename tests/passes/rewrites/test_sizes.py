"""Symbolic sizes are kept as expressions, found again for other lengths, and never where a guard that passes took does not hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import attn_compiler
from attn_compiler.passes.pipeline import running, steps
from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.passes.rewrites.sizes import SymbolSizes
from attn_compiler.torch_private import symbols as torch_symbols
from tests.passes.rewrites.compiling import attention, masked, qkv
from tests.passes.rewrites.test_values import symbolic
from tests.passes.rewrites.watching import Seen, watched, without_times


def compiled(function: Callable[..., Any], *calls: list[Any], **options: Any) -> list[Seen]:
    """The graphs of calls of one function that is compiled anew, with symbolic sizes. Outputs are eager's."""
    torch._dynamo.reset()
    attn_compiler.reset()
    with watched() as seen:
        options = {"inner": "eager", **options}
        ours = torch.compile(function, backend="attn_compiler", dynamic=True, options=options)
        for inputs in calls:
            torch.testing.assert_close(ours(*inputs), function(*inputs), atol=1e-5, rtol=1e-5)
    return seen


def of_length(length: int) -> list[Tensor]:
    return qkv(2, 3, length, 16)


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sizes are computed with, and what is made has them."""
    length, more = q.shape[2], q.shape[2] // 2 + 3
    bias = torch.zeros(length, length + more).masked_fill(torch.arange(length + more) >= length, -torch.inf)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1) * 0.25 + bias, -1) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])
    near = (at[:, None] - at).abs() <= max(q.shape[2] // 4, 2)
    return torch.softmax((q @ k.transpose(-2, -1) * 0.25).masked_fill(~near, -torch.inf), -1) @ v


@pytest.mark.parametrize("function", [attention, masked, padded, windowed])
def test_another_length_finds_what_the_passes_made(function: Callable[..., Any]) -> None:
    ((first,), (second,)) = (compiled(function, of_length(length), of_length(length + 5)) for length in (20, 33))
    assert (first.report.from_cache, first.report.not_kept) == (False, None)
    assert (second.report.from_cache, second.ran) == (True, ())
    assert (second.code, second.nodes) == (first.code, first.nodes)
    assert without_times(second.report) == without_times(first.report)
    # Every guard, those of the passes too, and all that is known of the symbols.
    assert second.guards == first.guards
    (by_passes,) = compiled(function, of_length(33), cache_rewrites=False)
    assert by_passes.ran
    assert (second.code, second.nodes, second.guards) == (by_passes.code, by_passes.nodes, by_passes.guards)

    assert without_times(second.report) == without_times(by_passes.report)


def test_a_length_that_is_the_same_as_another_one_is_another_graph() -> None:
    """Of q and k, whose lengths are then one symbol."""
    compiled(attention, [qkv(2, 3, 9, 16)[0], *of_length(20)[1:]])
    (seen,) = compiled(attention, of_length(20))
    assert not seen.report.from_cache
    (again,) = compiled(attention, [qkv(2, 3, 11, 16)[0], *of_length(23)[1:]])
    assert again.report.from_cache


def test_sizes_that_are_numbers_are_another_graph() -> None:
    compiled(attention, of_length(20))
    torch._dynamo.reset()
    with watched() as seen:
        torch.compile(attention, backend="attn_compiler", dynamic=False, options={"inner": "eager"})(*of_length(20))
    assert not seen[0].report.from_cache


@pytest.fixture
def asking() -> Iterator[None]:
    """The first pass asks whether a length is more than 30, as passes ask for what they can't know."""
    first, call = next(step for step in steps.PIPELINE if step.on == "unit"), running.call

    def asked(step: Any, values: running.StepValues) -> Any:
        if step is first:
            inputs = values.get("unit").graph.find_nodes(op="placeholder")
            q = next(x for node in inputs if isinstance(x := node.meta.get("example_value"), Tensor))
            bool(q.shape[2] > 30)
        return call(step, values)

    with mock.patch.object(running, "call", asked):
        yield


@pytest.mark.parametrize(("length", "others"), [(40, (31, 64)), (20, (30, 7))])
def test_guards_of_the_passes_are_asked_of_later_calls(length: int, others: tuple[int, int], asking: None) -> None:
    (first,) = compiled(attention, of_length(length))
    for other in others:
        (second,) = compiled(attention, of_length(other))
        assert second.report.from_cache
        assert second.guards == first.guards
    beyond = 35 if length == 20 else 25
    one, two = compiled(attention, of_length(length), of_length(beyond))
    assert one.report.from_cache
    assert not two.report.from_cache
    assert two.guards != one.guards


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_float_that_is_symbolic(is_fixed: bool) -> None:
    """As models' scales are with dynamic=True. Some kernels take a number, which the passes fix by a guard; others read a tensor."""

    def scaled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if is_fixed:
            return F.scaled_dot_product_attention(q, k, v, scale=scale)
        return torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v

    (first,), (second,), (other,) = (
        compiled(scaled, [*of_length(length), scale]) for length, scale in ((20, 0.25), (33, 0.25), (33, 0.3))
    )
    assert (first.report.from_cache, first.report.not_kept) == (False, None)
    assert second.report.from_cache
    assert second.guards == first.guards
    assert other.report.from_cache is not is_fixed
    score = other.report.sites[0].spec.score
    assert (score.scale, score.runtime_scale) == ((0.3, False) if is_fixed else (1.0, True))


def test_what_is_known_after_the_guards_is_compared() -> None:
    first, second = symbolic(8, 6), symbolic(10, 6)
    told, heard = SymbolSizes(), SymbolSizes()
    for sizes, x in ((told, first), (heard, second)):
        sizes.data_of(x.shape[0])
    assert told.known() == heard.known()
    assert bool(first.shape[0] > 5)
    guards = json.loads(json.dumps(told.taken()))
    assert len(guards) == 1
    assert heard.hold(guards)
    assert told.known() != heard.known()
    with pytest.raises(Unkeyed, match="something else"):
        heard.take(guards, "another")
    again = SymbolSizes()
    again.data_of(symbolic(12, 6).shape[0])
    again.take(guards, told.known())
    third = SymbolSizes()
    third.data_of(symbolic(4, 6).shape[0])
    assert not third.hold(guards)


def test_expressions_come_back() -> None:
    x = symbolic(8, 6)
    size = x.shape[0]
    sizes = SymbolSizes()
    for one in (
        size,
        size + 1,
        size * size * 3,
        size // 4,
        (size + 2) % 5,
        torch.sym_max(size, 9),
        torch.sym_min(size, 9),
    ):
        data = json.loads(json.dumps(sizes.data_of(one)))
        assert str(sizes.made(data)) == str(one)
    assert sizes.made(sizes.data_of(7)) == 7


def test_what_is_not_from_here_is_refused() -> None:
    sizes = SymbolSizes()
    with pytest.raises(Unkeyed, match="the graph none"):
        sizes.hold([["symbol", "s0"]])
    with pytest.raises(Unkeyed, match="has the size"):
        sizes.made(["size", ["number", 3]])
    size = symbolic(8, 6).shape[0]
    sizes.data_of(size)
    for data in (["symbol", "other"], ["system", ["number", 3]], ["number", "3"]):
        with pytest.raises(Unkeyed, match="has the size"):
            sizes.made(["size", data])
    with pytest.raises(Unkeyed, match="two compilations"):
        sizes.data_of(symbolic(8, 6).shape[0])
    with pytest.raises(Unkeyed, match="a size is bool"):
        sizes.data_of(True)


def test_a_size_that_data_decides_has_no_key() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        size: Any = env.create_unbacked_symint()
    sizes = SymbolSizes()
    sizes.data_of(size)
    with pytest.raises(Unkeyed, match="more is known"):
        sizes.known()


def test_a_function_that_is_not_told_is_refused() -> None:
    size = symbolic(8, 6).shape[0]
    sizes = SymbolSizes()
    sizes.data_of(size)
    with mock.patch.dict(torch_symbols.FUNCTIONS):
        del torch_symbols.FUNCTIONS["FloorDiv"]
        with pytest.raises(Unkeyed, match="FloorDiv"):
            sizes.data_of(size // 3)
