"""Constants of a graph, and tensors that are made like others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_compiler.passes.graph import constants
from attn_compiler.passes.graph.equal import are_equal
from attn_compiler.passes.graph.fake_records import FakeLike, FakeRecorder, Remaker
from attn_compiler.passes.graph.fragment_keys import Unknown
from attn_compiler.torch_private import tracing as torch_tracing
from tests.passes.compiling import mark, mirror_of

aten = torch.ops.aten


def _number(make: Callable[[Tensor], object]) -> float | None:
    """What `constants.number` says of the second factor in x * make(x)."""
    mirror = mirror_of(lambda x: x * make(x), mark(torch.ones(5, 3), [5]))
    products = [n for n in mirror.graph.nodes if n.target in (aten.mul.Tensor, aten.mul.Scalar)]
    return constants.number(mirror, products[-1].args[1])


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (lambda x: torch.tensor(False), lambda x: torch.tensor(False), True),
        (lambda x: torch.tensor(False), lambda x: torch.tensor(True), False),
        (lambda x: torch.tensor(2), lambda x: torch.tensor(2.0), False),
        (lambda x: torch.tensor(2.0), lambda x: torch.tensor([2.0]), False),
        (lambda x: torch.tensor(2**53), lambda x: torch.tensor(2**53 + 1), False),
        (lambda x: torch.tensor(2.0), lambda x: torch.tensor(2.0).add_(1), False),
    ],
)
def test_constants_of_one_number_are_equal(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], equal: bool
) -> None:
    mirror = mirror_of(lambda x: (x == one(x), x == other(x)), torch.ones(5, 3))
    first, second = (n for n in mirror.graph.nodes if n.target is aten.eq.Tensor)
    assert are_equal(mirror, first, second) is equal


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda x: 0.25, 0.25),
        (lambda x: 3, 3.0),
        (lambda x: torch.tensor(0.25), 0.25),
        (lambda x: torch.full([], 0.25), 0.25),
        (lambda x: torch.full((1, 1), 0.25), 0.25),
        (lambda x: x.new_full((), 0.25), 0.25),
        (lambda x: torch.tensor(16.0).sqrt(), 4.0),
        (lambda x: torch.tensor(16.0).rsqrt(), 0.25),
        (lambda x: 1 / torch.tensor(4.0), 0.25),
        (lambda x: torch.tensor(2.0) ** -2, 0.25),
        (lambda x: torch.tensor(0.25, dtype=torch.float64).to(x.dtype), 0.25),
        (lambda x: torch.zeros(()) - 0.25, -0.25),
        (lambda x: torch.ones(()) * 0.5 + 0.25, 0.75),
        (lambda x: torch.tensor(x.size(1)).float().sqrt(), 3**0.5),
        (lambda x: torch.tensor(torch.finfo(x.dtype).min), torch.finfo(torch.float32).min),
    ],
)
def test_numbers_that_are_known(make: Callable[[Tensor], object], number: float) -> None:
    assert _number(make) == pytest.approx(number)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[0, 0],
        lambda x: x.sum(),
        lambda x: x.size(0) ** -0.5,
        lambda x: torch.full((3,), 0.25),
        lambda x: torch.rand(()),
        lambda x: torch.tensor(float(x.size(0))),
        lambda x: torch.full([], 0.25) * x.sum(),
        lambda x: torch.tensor(0.25).mul_(2),
    ],
    ids=["element", "sum", "symbolic size", "several", "random", "tensor of a size", "times a sum", "written"],
)
def test_numbers_that_are_not(make: Callable[[Tensor], object]) -> None:
    assert _number(make) is None


def test_rounding_to_a_narrow_dtype_is_carried_out() -> None:
    number = _number(lambda x: torch.tensor(0.1).bfloat16().float())
    assert number == float(torch.tensor(0.1).bfloat16())


def test_a_number_written_later_on_is_not_known_either() -> None:
    def function(x: Tensor) -> Tensor:
        scale = torch.tensor(0.25)
        product = x * scale
        scale.add_(1)
        return product + scale

    mirror = mirror_of(function, torch.ones(2))
    (product,) = (n for n in mirror.graph.nodes if n.target is aten.mul.Tensor)
    assert constants.number(mirror, product.args[1]) is None


def test_a_buffer_of_the_model_is_no_constant() -> None:
    """It may hold another number at the next call."""
    buffer = torch.tensor(0.25)
    mirror = mirror_of(lambda x: x * buffer, torch.ones(2))
    (product,) = (n for n in mirror.graph.nodes if n.target is aten.mul.Tensor)
    assert constants.number(mirror, product.args[1]) is None


@pytest.mark.parametrize("value", [None, True, "0.25", [0.25]])
def test_other_arguments_are_no_numbers(value: object) -> None:
    mirror = mirror_of(lambda x: x + 1, torch.ones(2))
    assert constants.number(mirror, value) is None


# Tensors that are made like others, with known sizes and with symbolic ones.
MODE = FakeTensorMode(shape_env=ShapeEnv())


def _given(*, static: bool) -> Tensor:
    return MODE.from_tensor(torch.empty(5, 4), static_shapes=static)


def _recorded(holders: list[Tensor], *values: Tensor) -> list[FakeLike]:
    recorder = FakeRecorder(holders)
    with torch_tracing.beside_modes(MODE), torch.no_grad():
        return [recorder.made(value) for value in values]


def _made(holders: list[Tensor], found: list[FakeLike]) -> list[Tensor]:
    with torch_tracing.beside_modes(MODE), torch.no_grad():
        maker = Remaker(MODE, holders)
        return [maker.fake(made) for made in found]


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


@pytest.mark.parametrize("static", [True, False], ids=["known", "symbolic"])
def test_sizes_and_memory_are_those_of_the_first(static: bool) -> None:
    x, other = _given(static=static).requires_grad_(), _given(static=static)
    with MODE, torch.no_grad():
        view, new = x.t()[1:], x * 2
        of_new = new[:, 2:]
    found = _recorded([x], view, new, of_new)
    again = _made([other], found)
    for a, b in zip(again, (view, new, of_new), strict=True):
        told = [str((y.shape, y.stride(), y.storage_offset(), y.untyped_storage().nbytes())) for y in (a, b)]
        assert told[0] == told[1]
        assert (a.dtype, a.device, a.requires_grad, a.grad_fn) == (b.dtype, b.device, False, None)
    assert _memory(again[0]) == _memory(other)
    assert _memory(again[1]) == _memory(again[2])
    assert len({_memory(y) for y in (x, other, new, again[1])}) == 4


def test_what_is_made_can_be_computed_with() -> None:
    (again,) = _made([], _recorded([], _given(static=False)))
    with MODE:
        assert str((again @ again.mT).shape) == str((again.shape[0],) * 2).replace("(", "torch.Size([").replace(
            ")", "])"
        )


def test_nothing_is_computed_of_symbolic_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what takes the time."""
    from torch.fx.experimental import sym_node

    x = _given(static=False)
    with MODE:
        view, new = x.t(), x + 1
    found = _recorded([x], view, new)
    computed: list[str] = []
    known = sym_node.SymNode.mul

    def mul(self: sym_node.SymNode, other: sym_node.SymNode) -> sym_node.SymNode:
        computed.append("mul")
        return known(self, other)

    monkeypatch.setattr(sym_node.SymNode, "mul", mul)
    _made([x], found)
    assert computed == []
    with MODE:
        torch.empty(x.shape)
    assert computed


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.view(torch.int32),
        lambda x: torch.view_as_complex(x.reshape(5, 2, 2)).conj(),
        lambda x: x.to_sparse(),
    ],
    ids=["of another dtype in its memory", "conjugated", "sparse"],
)
def test_what_is_not_like_plain_tensors_is_unknown(make: object) -> None:
    x = _given(static=True)
    with MODE:
        value = make(x)  # type: ignore[operator]
    with pytest.raises(Unknown):
        _recorded([x], value)
