"""Views: of axes, with strides, arranged, and of one memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from torch import Tensor, fx, nn

from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.aliasing import Aliases, memory_of
from attn_compiler.passes.graph.axes import AxisError
from tests.passes.compiling import CPU_FLASH, Compiled, captured, compiled, mark, mirror_of
from tests.passes.view_chains import Chain, chains, followed, traced

aten = torch.ops.aten


@settings(max_examples=100, deadline=None)
@given(chains())
def test_every_dimension_is_the_product_of_its_atoms_and_none_is_lost(chain: Chain) -> None:
    try:
        root_dims, dims = followed(chain.run, chain.root())
    except AxisError:
        event("an axis can't be followed")
        return
    event("followed")
    assert tuple(int(axes.dim_size(dim)) for dim in dims) == chain.run(chain.root()).shape
    kept = [a for a in axes.flat(dims) if a.size != axes.ONE and not a.broadcast]
    assert set(kept) == {a for a in axes.flat(root_dims) if a.size != axes.ONE}
    assert len(set(kept)) == len(kept)


def _last(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> fx.Node:
    return traced(function, x)[-1]


def test_an_axis_split_later_is_split_for_everyone_who_holds_it() -> None:
    root_dims, dims = followed(lambda x: x.transpose(0, 1).unflatten(0, (2, 3)), torch.zeros(4, 6))
    assert [int(a.size) for a in axes.resolve(root_dims[1])] == [2, 3]
    assert axes.resolve(root_dims[1]) == (*dims[0], *dims[1])


def test_repeat_kv_in_its_spellings_gives_the_same_axes() -> None:
    def by_expand(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None].expand(2, 3, 4, 5, 6).reshape(2, 12, 5, 6)

    def by_interleave(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(4, dim=1)

    def by_broadcast(x: torch.Tensor) -> torch.Tensor:
        return torch.broadcast_to(x[:, :, None], (2, 3, 4, 5, 6)).reshape(2, 12, 5, 6)

    for function in (by_expand, by_interleave, by_broadcast):
        _, dims = followed(function, torch.zeros(2, 3, 5, 6))
        heads = axes.resolve(dims[1])
        assert [(int(a.size), a.broadcast) for a in heads] == [(3, False), (4, True)]


def test_tiling_repeats_in_front_of_the_axis() -> None:
    _, dims = followed(lambda x: x.repeat(1, 4, 1), torch.zeros(2, 3, 5))
    assert [(int(a.size), a.broadcast) for a in dims[1]] == [(4, True), (3, False)]


def test_reshape_across_axes_is_refused() -> None:
    with pytest.raises(AxisError, match="split at 3"):
        followed(lambda x: x.reshape(3, 2), torch.zeros(2, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x[1:],
        lambda x: x.detach(),
        lambda x: x.to(torch.float64),
        lambda x: x.softmax(-1),
        lambda x: x.as_strided((2, 2), (1, 1)),
        lambda x: x.diagonal(),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 3, 1]), dim=0),
        lambda x: torch.dropout(x, 0.5, True),
    ],
    ids=["add", "flip", "roll", "slice", "detach", "cast", "softmax", "as_strided", "diagonal", "counts", "dropout"],
)
def test_what_changes_elements_or_stops_a_gradient_is_no_view(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    node = _last(function, torch.zeros(4, 4))
    assert not views.is_view(node)
    with pytest.raises(AxisError):
        views.forward(node, axes.fresh(axes.shape_exprs(views.value(node))))


@pytest.mark.parametrize(
    "function",
    [lambda x: x[:], lambda x: x.to(torch.float32, copy=True), lambda x: torch.dropout(x, 0.5, False)],
    ids=["whole slice", "cast to the same", "inactive dropout"],
)
def test_ops_that_change_nothing_are_views(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    node = _last(function, torch.zeros(4, 4))
    assert views.is_view(node)
    dims = axes.fresh(axes.shape_exprs(views.value(node)))
    assert views.forward(node, dims) == dims


def test_chain_goes_up_to_what_is_no_view() -> None:
    nodes = traced(lambda x: (x * 2).transpose(0, 1).contiguous(), torch.zeros(2, 3))
    chain = views.chain(nodes[-1])
    assert [n.target for n in chain] == [aten.contiguous.default, aten.transpose.int, aten.mul.Tensor]


@pytest.mark.parametrize(
    ("function", "costly"),
    [
        (lambda x: x.expand(4, 2, 3), True),
        (lambda x: x.repeat(2, 1), True),
        (lambda x: x.t().contiguous(), True),
        (lambda x: x.t().reshape(6), True),
        (lambda x: x.view(1, 2, 3), False),
        (lambda x: x.t(), False),
        (lambda x: x.unsqueeze(0), False),
    ],
)
def test_only_what_can_copy_or_repeat_is_costly(function: Callable[[torch.Tensor], torch.Tensor], costly: bool) -> None:
    assert views.is_costly(_last(function, torch.zeros(2, 3))) == costly


def test_argument_is_found_by_name_however_it_was_passed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    by_position = graph.call_function(aten.transpose.int, (x, 0, 1))
    by_keyword = graph.call_function(aten.softmax.int, (x,), {"dim": -1})
    assert views.argument(by_position, "dim1") == 1
    assert views.argument(by_keyword, "dim") == -1
    assert views.argument(by_keyword, "dtype") is None
    assert views.argument(by_keyword, "no such name", 7) == 7


def test_asking_for_a_shape_reads_no_element() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return mask.expand_as(x) + torch.zeros_like(x) + x

    mirror = mirror_of(function, torch.zeros(2, 3), torch.zeros(3))
    (x,) = (n for n in mirror.graph.nodes if n.op == "placeholder" and views.value(n).dim() == 2)
    reads = {user.target: views.reads_elements(user, x) for user in x.users}
    assert reads == {aten.expand_as.default: False, aten.zeros_like.default: False, aten.add.Tensor: True}


def test_a_tensor_expanded_like_itself_is_read() -> None:
    mirror = mirror_of(lambda x: x.expand_as(x), torch.zeros(2, 3))
    (node,) = (n for n in mirror.graph.nodes if n.target is aten.expand_as.default)
    assert views.reads_elements(node, views.source(node))


# What comes after a site may rely on the strides that the model's own output had.
B, H, S, D = 2, 4, 6, 8
sdpa = F.scaled_dot_product_attention


def _heads(x: Tensor) -> Tensor:
    """(B, S, H·D) -> (B, H, S, D), strided as every model has it: kernels answer in the same order."""
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def _written_out(x: Tensor) -> Tensor:
    # Made in the graph: x itself could be written to by the user.
    heads = _heads(x.sin())
    return F.softmax(heads @ heads.mT * 0.25, -1) @ heads


def _check(function: Callable[[Tensor], Tensor], *, grad: bool = False) -> Compiled:
    generator = torch.Generator().manual_seed(0)
    eager = torch.randn(B, S, H * D, generator=generator, requires_grad=grad)
    own = eager.detach().clone().requires_grad_(grad)
    run = compiled(function)
    wanted, got = function(eager), run(own)
    torch.testing.assert_close(got, wanted)
    assert got.stride() == wanted.stride()
    if grad:
        wanted.sin().sum().backward()
        got.sin().sum().backward()
        torch.testing.assert_close(own.grad, eager.grad)
    assert CPU_FLASH in run.calls
    return run


def _copies(run: Compiled) -> list[str]:
    return [copy.operand for copy in run.site.copies]


@pytest.mark.in_turns
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "after",
    [
        lambda out: out.view(B, -1),
        lambda out: out.view(B * H, S, D).sum(1),
        lambda out: torch.as_strided(out, (B, H), (H * S * D, S * D)),
        lambda out: out,
        lambda out: out.transpose(1, 2),
        lambda out: (out, 1)[0].unsqueeze(0),
    ],
    ids=["view", "view of heads", "as_strided", "output", "transposed output", "unsqueezed output"],
)
def test_who_relies_on_strides_gets_them(after: Callable[[Tensor], Tensor], grad: bool) -> None:
    run = _check(lambda x: after(_written_out(x)), grad=grad)
    assert _copies(run) == ["out"]
    (copy,) = run.site.copies
    assert copy.bytes == B * H * S * D * 4
    assert copy.why.endswith("needs the strides that the model made")


@pytest.mark.in_turns
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "after",
    [
        lambda out: out.transpose(1, 2).reshape(B, S, H * D) @ torch.ones(H * D, 3),
        lambda out: out.transpose(1, 2).contiguous().view(B, S, H * D).cos(),
        lambda out: out.permute(0, 2, 1, 3).flatten(2).sum(-1),
        lambda out: out.sum(),
        lambda out: out.transpose(1, 2).reshape(B, S, H * D).relu() + 1,
    ],
    ids=["projection", "contiguous view", "flatten and sum", "sum", "elementwise"],
)
def test_who_does_not_rely_on_them_gets_no_copy(after: Callable[[Tensor], Tensor], grad: bool) -> None:
    run = _check(lambda x: after(_written_out(x)), grad=grad)
    assert _copies(run) == []


def test_strides_that_are_the_same_anyway_cost_nothing() -> None:
    run = compiled(lambda q: F.softmax(q @ q.mT, -1) @ q)
    q = torch.randn(B, H, S, D)
    assert run(q).stride() == q.stride()
    assert _copies(run) == []


def test_symbolic_strides() -> None:
    def function(x: Tensor) -> Tensor:
        return _written_out(x).view(x.size(0), H, -1)

    run = compiled(function)
    for length in (S, S + 3):
        x = torch.randn(B, length, H * D)
        got = run(mark(x, [length]))
        torch.testing.assert_close(got, function(x))
        assert got.stride() == function(x).stride()
    assert len(run.reports) == 1
    assert _copies(run) == ["out"]
    (copy,) = run.site.copies
    assert copy.bytes is None


def test_output_that_is_written_to_afterwards() -> None:
    """The backward of a kernel reads its output: it must not be the tensor that the model writes into."""

    def function(x: Tensor) -> Tensor:
        out = _written_out(x)
        out.mul_(2)
        return out.sin()

    run = _check(function, grad=True)
    assert _copies(run) == ["out"]


@pytest.mark.parametrize("function", [_written_out, lambda x: sdpa(*[_heads(x)] * 3)], ids=["written out", "sdpa"])
def test_reshape_that_becomes_a_view_of_what_is_written_to(function: Callable[[Tensor], Tensor]) -> None:
    """In the model the reshape copies, so the write below does not reach the output."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        out = function(x)
        merged = out.transpose(1, 2).reshape(B, S, H * D)
        merged.add_(1.0)
        return merged, out

    x = torch.randn(B, S, H * D)
    run = compiled(model)
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("also_returned", [False, True])
def test_a_contiguous_that_becomes_a_view_of_what_the_user_writes_to(also_returned: bool) -> None:
    """Written out, `contiguous` copies; of a kernel's own output, which the backward reads, it would be the output itself."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        out = _written_out(x)
        rows = out.transpose(1, 2).contiguous().transpose(1, 2)
        return (rows, out) if also_returned else (rows,)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, H * D, generator=generator)
    upstream = torch.randn(B, H, S, D, generator=generator)
    found = []
    run = compiled(function)
    for call in (function, run):
        own = x.clone().requires_grad_()
        outputs = call(own)
        with torch.no_grad():
            outputs[0].add_(1)
        outputs[-1].backward(upstream)
        found.append([*(out.detach() for out in outputs), own.grad])
    torch.testing.assert_close(found[1], found[0])


def test_without_gradients_nothing_reads_an_output_again() -> None:
    def function(x: Tensor) -> Tensor:
        return _written_out(x).transpose(1, 2).contiguous()

    run = compiled(function)
    with torch.no_grad():
        torch.testing.assert_close(run(torch.ones(B, S, H * D)), function(torch.ones(B, S, H * D)))
    assert _copies(run) == []


# Which storages are reached from outside of a graph.
class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made = x * self.weight
        y.add_(1)
        seen = y.data
        return made.view(-1), made.exp() + seen


def test_what_goes_in_and_out_and_who_writes() -> None:
    gm, _ = captured(_Model(), torch.randn(3), torch.randn(3))
    aliases, nodes = Aliases(graph=gm.graph), {node.name: node for node in gm.graph.nodes}
    x, y, weight = (next(node for name, node in nodes.items() if part in name) for part in ("l_x_", "l_y_", "weight"))
    made = next(node for name, node in nodes.items() if name.startswith("made"))
    assert memory_of(made) <= aliases.returned
    assert not memory_of(x) & aliases.returned
    assert memory_of(x) | memory_of(y) | memory_of(weight) == aliases.given
    assert aliases.parameters == memory_of(weight)
    assert aliases.written == memory_of(y)
    assert aliases.taken_as_data == memory_of(y)
    assert memory_of(None) == set()


def test_it_is_of_the_graph_as_it_was_when_it_was_first_asked() -> None:
    gm, _ = captured(lambda x: x.exp(), torch.randn(3))
    aliases = Aliases(graph=gm.graph)
    before = aliases.returned
    output = gm.graph.output_node()
    output.args = ((gm.graph.find_nodes(op="placeholder")[0],),)
    assert aliases.returned is before
