"""Tensors that are made like others, with known sizes and with symbolic ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_compiler.passes.graph.fake_records import FakeLike, FakeRecorder, Remaker
from attn_compiler.passes.graph.fragment_keys import Unknown
from attn_compiler.torch_private import tracing as torch_tracing

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
