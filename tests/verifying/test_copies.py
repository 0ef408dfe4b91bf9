from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from attn_compiler.verifying.copies import copied_module, is_trained_parameter, isolated, leaving_no_trace


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
