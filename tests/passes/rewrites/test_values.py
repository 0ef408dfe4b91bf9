from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.passes.rewrites.values import GraphValues
from attn_compiler.torch_private import tracing as torch_tracing

MODE = FakeTensorMode()


def symbolic(rows: int, columns: int) -> Any:
    """A fake tensor whose rows are symbolic."""
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return mode.from_tensor(torch.empty(rows, columns), symbolic_context=context, source=ConstantSource("x"))


def _fake(make: Callable[[], Any]) -> Any:
    with MODE:
        return make()


def _text(*values: Any) -> str:
    told = GraphValues()
    return json.dumps([told.data_of(value) for value in values])


def _empty(**more: Any) -> Tensor:
    return torch.empty(4, 6, **more)


def _written() -> Tensor:
    """A tensor that autograd refuses every use of."""
    base = torch.ones(4, 6, requires_grad=True).clone()
    view = base.chunk(2)[0]
    with torch.no_grad():
        base.add_(1)
    base.mul_(2)
    return view


#: each differs from the first in one thing
ALONE: dict[str, Callable[[], Any]] = {
    "as it is": _empty,
    "shape": lambda: torch.empty(6, 4),
    "dtype": lambda: _empty(dtype=torch.int32),
    "device": lambda: _empty(device="cuda"),
    "strides": lambda: torch.empty_strided((4, 6), (1, 4)),
    "offset": lambda: torch.empty(24).as_strided((3, 6), (6, 1), 6).detach(),
    "no offset": lambda: torch.empty(24).as_strided((3, 6), (6, 1), 0).detach(),
    "memory": lambda: torch.empty(25).as_strided((4, 6), (6, 1)).detach(),
    "gradient": lambda: _empty(requires_grad=True),
    "computed": lambda: _empty(requires_grad=True) * 2,
    "view": lambda: _empty().view(4, 6),
    "parameter": lambda: nn.Parameter(_empty()),
    "buffer": lambda: nn.Parameter(_empty(), requires_grad=False),
    "conjugated": lambda: _empty(dtype=torch.complex64).conj(),
    "complex": lambda: _empty(dtype=torch.complex64),
    "negated": lambda: _empty(dtype=torch.complex64).conj().imag,
    "imaginary": lambda: _empty(dtype=torch.complex64).imag,
    "nothing": lambda: None,
    "zero": lambda: 0,
    "zero point zero": lambda: 0.0,
    "minus zero": lambda: -0.0,
    "false": lambda: False,
    "text": lambda: "tensor",
    "tuple": lambda: (_empty(),),
    "list": lambda: [_empty()],
    "size": lambda: torch.Size([1]),
    "tuple of one": lambda: (1,),
    "values and indices": lambda: torch.max(_empty(), 0),
    "indices and values": lambda: torch.sort(_empty(), 0),
}


def test_every_difference_is_told() -> None:
    texts = {name: _text(_fake(make)) for name, make in ALONE.items()}
    assert len(set(texts.values())) == len(texts), texts
    assert texts == {name: _text(_fake(make)) for name, make in ALONE.items()}


def test_inference_tensors_are_told() -> None:
    with torch.inference_mode():
        made = _fake(_empty)
    assert _text(made) != _text(_fake(_empty))


def test_which_are_one_object_and_which_share_memory() -> None:
    x, y = _fake(_empty), _fake(_empty)
    with MODE:
        same_memory, view = x.detach(), x.view(4, 6)
    texts = {_text(x, y), _text(x, x), _text(x, same_memory), _text(x, view)}
    assert len(texts) == 4
    assert _text(x, y) == _text(y, x)


def test_numbers_that_are_known_while_compiling_are_told() -> None:
    made = [_fake(lambda number=number: torch.tensor(number)) for number in (0.5, 0.25, 0.5)]
    assert all(x.constant is not None for x in made)
    texts = [_text(x) for x in made]
    assert texts[0] == texts[2] != texts[1]


def test_what_vmap_holds_is_told_by_its_axis() -> None:
    found: list[str] = []

    def tell(x: Tensor) -> Tensor:
        found.append(_text(x))
        return x

    with MODE:
        x = torch.empty(4, 4)
        for axis in (0, 1):
            torch.vmap(tell, in_dims=axis)(x)
    assert len(set(found)) == 2
    assert "transformed" in found[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.empty(4), "a value of the graph is torch.Tensor"),
        (lambda: nn.Linear(1, 1), "a value of the graph is torch.nn.modules.linear.Linear"),
        (lambda: _fake(lambda: torch.empty(4, 4).to_sparse()), "a tensor of the graph is torch.sparse_coo"),
        (lambda: print, "a value of the graph is builtins"),
    ],
)
def test_what_is_not_all_told_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(Unkeyed, match=said):
        _text(make())


def test_symbolic_sizes_are_expressions() -> None:
    (x, size), (y, other) = ((x, x.shape[0]) for x in (symbolic(7, 3), symbolic(9, 3)))
    assert _text(x) == _text(y) != _text(symbolic(3, 7).t())
    assert _text(size) == _text(other) != _text(size + 1)
    assert _text(torch.sym_float(size)) == _text(torch.sym_float(other)) != _text(size)


def test_values_of_symbolic_sizes_are_made_again_for_another_length() -> None:
    given, again = symbolic(8, 6), symbolic(10, 6)
    with given.fake_mode:
        new = [given[2:, :3], given.new_empty((given.shape[0] * 2, 5)), given.shape[0] // 2]
    told, heard = GraphValues(), GraphValues()
    told.data_of(given)
    heard.data_of(again)
    data = json.loads(json.dumps([told.record(value) for value in new]))
    with torch_tracing.beside_modes(again.fake_mode):
        view, whole, half = (heard.made(one, again.fake_mode) for one in data)
    assert [str(x) for x in (*view.shape, *view.stride(), view.storage_offset())] == [
        str(x) for x in (*new[0].shape, *new[0].stride(), new[0].storage_offset())
    ]
    assert view.untyped_storage()._cdata == again.untyped_storage()._cdata
    assert (view.shape[0], whole.shape[0], half) == (8, 20, 5)


def test_a_tensor_that_autograd_refuses_is_told() -> None:
    x = _fake(_written)
    with pytest.raises(RuntimeError):
        _ = x.is_leaf
    assert _text(x) == _text(_fake(_written))


def test_values_are_made_again_in_their_memory() -> None:
    given, new = _fake(_empty), [_fake(lambda: torch.empty(3, 2, dtype=torch.float16, requires_grad=True))]
    with MODE:
        new += [new[0].detach().t(), given[1:, 2:], None, (given.view(torch.int32), given)]
    told, again = GraphValues(), GraphValues()
    told.data_of(given)
    again.data_of(given)
    data = json.loads(json.dumps([told.record(value) for value in new]))
    with torch_tracing.beside_modes(MODE):
        made = [again.made(one, MODE) for one in data]
    for one, other in zip([*new[:3], *new[4]], [*made[:3], *made[4]], strict=True):
        for what in ("dtype", "shape", "device", "requires_grad"):
            assert getattr(one, what) == getattr(other, what)
        assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
    memory = [x.untyped_storage()._cdata for x in (given, *made[:3], *made[4])]
    assert memory[0] == memory[3] == memory[4] == memory[5] != memory[1] == memory[2]
    assert made[3] is None


def test_data_of_no_value_is_refused() -> None:
    with pytest.raises(Unkeyed, match="a record has the value"):
        GraphValues().made(["tensor", "load", ["device", "cpu", None], [1], [1], 0, [0, 4], False], MODE)
