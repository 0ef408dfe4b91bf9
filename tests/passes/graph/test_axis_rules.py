"""Which axes an op keeps positions at, and axes that vmap adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed import tensor as dtensors

from attn_compiler.passes.context_parallel.following import Following, Input
from attn_compiler.passes.context_parallel.places import Place
from attn_compiler.passes.graph import axes, axis_rules, mutation
from attn_compiler.passes.graph.axes import Atom, AxisError, Dims
from attn_compiler.passes.graph.mirror import Mirror, Origins
from attn_compiler.passes.graph.vmap_axes import VmapAxis
from attn_compiler.passes.spelling import dtensor_rules
from attn_compiler.passes.unpad import rules
from attn_compiler.passes.unpad.forms import FormRecipe, KeepsPadding, Kind, Value
from attn_compiler.torch_private import dtensors as torch_dtensors, tracing as torch_tracing
from attn_compiler.torch_private.dtensors import Shards
from tests.meshes import fake_mesh
from tests.passes.compiling import mirror_of

# What each op does with the axis of positions, as taking padding out, ranks that share a sequence, and DTensors know it.
B, S, D = 2, 7, 12
Function = Callable[[Mapping[str, Tensor]], Tensor]

#: (B, S, ·) hold positions; the others are the model's own
GIVEN = {
    "x": torch.randn(B, S, D),
    "y": torch.randn(B, S, D),
    "ids": torch.randint(5, (B, S)),
    "w": torch.randn(D, D),
    "b": torch.randn(D),
    "table": torch.randn(5, D),
}
OF_POSITIONS = ("x", "y", "ids")

BOTH: dict[str, Function] = {
    "add": lambda t: t["x"] + t["y"],
    "mul by features": lambda t: t["x"] * t["b"],
    "gelu": lambda t: F.gelu(t["x"]),
    "where": lambda t: torch.where(t["ids"][..., None] > 2, t["x"], t["y"]),
    "pairs": lambda t: t["ids"][:, :, None] + t["ids"][:, None, :],
    "transposed": lambda t: t["x"].transpose(1, 2),
    "heads": lambda t: t["x"].view(B, S, 3, 4).transpose(1, 2),
    "heads and back": lambda t: t["x"].view(B, S, 3, 4).transpose(1, 2).transpose(1, 2).reshape(B, S, D),
    "rows and positions as one axis": lambda t: t["x"].reshape(B * S, D),
    "flattened and back": lambda t: t["x"].reshape(B * S, D).reshape(B, S, D),
    "cut positions": lambda t: t["x"].reshape(B, D, S),
    "unsqueeze": lambda t: t["x"][:, None],
    "squeeze": lambda t: t["x"][:, None].squeeze(1),
    "expand": lambda t: t["x"][:, None].expand(B, 3, S, D),
    "broadcast_to": lambda t: torch.broadcast_to(t["x"][:, None], (B, 3, S, D)),
    "moveaxis": lambda t: t["x"].moveaxis(1, 2),
    "ravel": lambda t: t["x"].ravel(),
    "repeat_interleave": lambda t: t["x"].repeat_interleave(2, 2),
    "to": lambda t: t["x"].to(torch.float64),
    "type_as": lambda t: t["ids"].type_as(t["x"]),
    "clone": lambda t: t["x"].clone(),
    "softmax of features": lambda t: t["x"].softmax(-1),
    "softmax of positions": lambda t: t["x"].softmax(1),
    "sum of features": lambda t: t["x"].sum(-1),
    "sum of positions": lambda t: t["x"].sum(1),
    "sum of all": lambda t: t["x"].sum(()),
    "mean, kept": lambda t: t["x"].mean(-1, keepdim=True),
    "argmax": lambda t: t["x"].argmax(-1),
    "cumsum of positions": lambda t: t["x"].cumsum(1),
    "norm": lambda t: t["x"].norm(2, -1),
    "std": lambda t: t["x"].std(-1, correction=0),
    "one feature": lambda t: t["x"].select(2, 0),
    "one position": lambda t: t["x"].select(1, 0),
    "slice of features": lambda t: t["x"][..., 2:5],
    "slice of positions": lambda t: t["x"][:, 1:],
    "slice of all": lambda t: t["x"][:, 0:],
    "split": lambda t: t["x"].split(4, -1)[1],
    "split of positions": lambda t: t["x"].split(4, 1)[1],
    "chunk": lambda t: t["x"].chunk(3, 2)[2],
    "unbind": lambda t: t["x"].unbind(2)[3],
    "glu": lambda t: F.glu(t["x"]),
    "linear": lambda t: F.linear(t["x"], t["w"], t["b"]),
    "linear of positions": lambda t: F.linear(t["x"].transpose(1, 2), torch.ones(S, S)),
    "matmul": lambda t: t["x"] @ t["w"],
    "mm": lambda t: torch.mm(t["x"].reshape(B * S, D), t["w"]),
    "addmm": lambda t: torch.addmm(t["b"], t["x"].reshape(B * S, D), t["w"]),
    "layer_norm": lambda t: F.layer_norm(t["x"], [D], t["b"], t["b"]),
    "layer_norm over positions": lambda t: F.layer_norm(t["x"], [S, D]),
    "rms_norm": lambda t: F.rms_norm(t["x"], [D], t["b"]),
    "embedding": lambda t: F.embedding(t["ids"], t["table"]),
    "stack": lambda t: torch.stack([t["x"], t["y"]], -1),
    "cat of features": lambda t: torch.cat([t["x"], t["y"]], -1),
    "cat of positions": lambda t: torch.cat([t["x"], t["y"]], 1),
    "loss of each": lambda t: F.cross_entropy(t["x"].flatten(0, 1), t["ids"].flatten(), reduction="none"),
    "mean loss": lambda t: F.cross_entropy(t["x"].flatten(0, 1), t["ids"].flatten()),
    "norm of positions": lambda t: t["x"] / t["x"].norm(2, 1, keepdim=True),
}

#: ops that padding is not taken out through: nothing shows yet that they do the same on real tokens alone
RANKS_ALONE: dict[str, Function] = {
    "topk": lambda t: t["x"].topk(2, -1).values,
    "sort": lambda t: t["x"].sort(-1).values,
    "narrow": lambda t: t["x"].narrow(2, 1, 3),
    "flip": lambda t: t["x"].flip(2),
    "max": lambda t: t["x"].max(-1).values,
    "var_mean": lambda t: torch.var_mean(t["x"], -1)[1],
    "bmm": lambda t: torch.bmm(t["x"], t["w"].expand(B, D, D)),
    "baddbmm": lambda t: torch.baddbmm(t["b"], t["x"], t["w"].expand(B, D, D)),
    "heads of positions": lambda t: t["x"][..., None, :] @ t["y"][..., None],
    "whole numbers": lambda t: t["ids"] // 2,
    "in place": lambda t: t["x"].clone().masked_fill_(t["ids"][..., None] > 2, 0.0),
    "buckets": lambda t: torch.bucketize(t["ids"], torch.arange(3)),
    "table[ids]": lambda t: t["table"][t["ids"]],
    "index_select": lambda t: t["table"].index_select(0, t["ids"].flatten()),
    "gather": lambda t: t["table"][None, :, 0].expand(B, -1).gather(1, t["ids"]),
    "einsum": lambda t: torch.einsum("bsd,de->bse", t["x"], t["w"]),
}
MIXING = frozenset(
    {"pairs", "cut positions", "softmax of positions", "sum of positions", "sum of all", "cumsum of positions"}
    | {"one position", "slice of positions", "split of positions", "linear of positions", "layer_norm over positions"}
    | {"cat of positions", "mean loss", "norm of positions"}
)


def _traced(function: Function) -> Mirror:
    def run(*tensors: Tensor) -> Tensor:
        return function(dict(zip(GIVEN, tensors, strict=True)))

    graph = torch_tracing.trace_pre_dispatch(run, list(GIVEN.values())).graph
    return Mirror(graph, Origins(owners={}, values={}, arguments={}, vmap_axes={}))


def _result(mirror: Mirror) -> fx.Node:
    (out,) = mirror.graph.output_node().all_input_nodes
    return out


def _inputs(mirror: Mirror) -> dict[str, fx.Node]:
    return dict(zip(GIVEN, mirror.graph.find_nodes(op="placeholder"), strict=True))


def _held(dims: Dims, atom: Atom) -> list[int]:
    return [i for i, dim in enumerate(dims) if atom in axes.resolve(dim)]


class _Padded:
    """What the rules of padding ask."""

    def __init__(self, mirror: Mirror) -> None:
        self.batch, self.seq = Atom(axes.size_expr(B)), Atom(axes.size_expr(S))
        self.known: dict[fx.Node, Value] = {}
        for name, node in _inputs(mirror).items():
            dims = axes.fresh(axes.shape_exprs(node.meta["val"]))
            if name in OF_POSITIONS:
                dims = ((self.batch,), (self.seq,), *dims[2:])
            self.known[node] = self._of(dims)

    def _of(self, dims: Dims, several: tuple[Dims, ...] | None = None) -> Value:
        has = bool(_held(dims, self.batch)) and bool(_held(dims, self.seq))
        packed = FormRecipe(needs=(), make=lambda maker, given: given[0]) if has else None
        return Value(kind=Kind.ORIGINAL, dims=dims, packed=packed, several=several)

    def value(self, node: fx.Node) -> Value:
        return self.known[node]

    def follow(self, mirror: Mirror) -> Value:
        for node in mirror.graph.nodes:
            if node.op == "call_function":
                if not node.all_input_nodes:
                    self.known[node] = self._of(axes.fresh(axes.shape_exprs(node.meta["val"])))
                    continue
                found = rules.packed_result(self, node)
                self.known[node] = self._of(found.dims, found.several)
        return self.known[_result(mirror)]


def of_padding(function: Function) -> list[int] | None:
    """Which axes of the result hold positions; None where an op mixes them."""
    mirror = _traced(function)
    context = _Padded(mirror)
    try:
        return _held(context.follow(mirror).dims, context.seq)
    except (KeepsPadding, AxisError):
        return None


def of_ranks(function: Function) -> list[int] | None:
    mirror = _traced(function)
    inputs = _inputs(mirror)
    one = Input(node=inputs["x"], axis=1, length=S)
    empty = Mirror(fx.Graph(), Origins(owners={}, values={}, arguments={}, vmap_axes={}))
    outer = Following(empty, {inputs["x"]: one}, (), ())
    (atom,) = outer.atoms
    known = {}
    for name, node in inputs.items():
        dims = axes.fresh(axes.shape_exprs(node.meta["val"]))
        known[node] = Place(dims=(dims[0], (atom,), *dims[2:]) if name in OF_POSITIONS else dims)
    found = outer.inside(mirror, known).places[_result(mirror)]
    return _held(found.dims, atom) if isinstance(found, Place) else None


@pytest.mark.parametrize("name", BOTH)
def test_padding_and_ranks_see_positions_at_the_same_axes(name: str) -> None:
    found = of_ranks(BOTH[name])
    assert found == of_padding(BOTH[name])
    assert (found is None) == (name in MIXING)


@pytest.mark.parametrize("name", RANKS_ALONE)
def test_ops_that_only_ranks_follow(name: str) -> None:
    assert of_ranks(RANKS_ALONE[name])
    assert of_padding(RANKS_ALONE[name]) is None


def test_every_rule_has_a_case() -> None:
    cases = (*BOTH.values(), *RANKS_ALONE.values())
    lines = [axis_rules.RULES.get(node.target) for function in cases for node in _traced(function).graph.nodes]
    assert {line.rule for line in lines if line is not None} == {line.rule for line in axis_rules.RULES.values()}


def _of_dtensors(function: Callable[..., Tensor], *given: Tensor) -> list[int] | None:
    """Which axes of the result are cut, by PyTorch and if the rules of DTensors leave the op to local tensors."""
    graph = fx.Graph()
    nodes = []
    for i, x in enumerate(given):
        nodes.append(graph.placeholder(f"x{i}"))
        nodes[-1].meta["example_value"] = x
    node = graph.call_function(function, tuple(nodes))
    node.meta["example_value"] = value = function(*given)
    out = torch_dtensors.shards(value, "out")
    return sorted(out.cut) if isinstance(out, Shards) and dtensor_rules.refused(node, out) is None else None


def test_dtensors_see_the_same_but_for_products_of_rows() -> None:
    with fake_mesh(2) as mesh:
        x, y = (dtensors.distribute_tensor(GIVEN[name][:, :6], mesh, [dtensors.Shard(1)]) for name in ("x", "y"))
        w = dtensors.distribute_tensor(GIVEN["w"], mesh, [dtensors.Replicate()])
        assert _of_dtensors(torch.add, x, y) == of_ranks(BOTH["add"]) == [1]
        assert _of_dtensors(torch.tanh, x) == of_ranks(lambda t: t["x"].tanh()) == [1]
        # Of an attention, the rows of a product are its queries: those are not cut.
        assert _of_dtensors(torch.matmul, x, w) is None
        assert of_ranks(BOTH["matmul"]) == [1]


# Which vmap an axis belongs to.
X = torch.arange(12).view(3, 4)


def _axes(function: Callable[[Tensor], Tensor], x: Tensor = X) -> list[VmapAxis]:
    return list(mirror_of(function, x).vmap_axes.values())


def test_a_level_used_again_is_another_region() -> None:
    axes = _axes(lambda x: torch.vmap(lambda a: a + 1)(x) + torch.vmap(lambda a: a * 2)(x))
    assert [(axis.region, axis.added) for axis in axes] == [(1, True), (1, False), (2, True), (2, False)]
    assert all(axis.is_plain for axis in axes)


def test_regions_inside_of_each_other() -> None:
    axes = _axes(lambda x: torch.vmap(torch.vmap(lambda a: a + 1, out_dims=0), in_dims=1, out_dims=1)(x))
    assert [(axis.region, axis.added, axis.dim) for axis in axes] == [
        (1, True, 1),
        (2, True, 0),
        (2, False, 0),
        (1, False, 1),
    ]


def test_random_numbers_make_a_region_closed() -> None:
    axes = _axes(lambda x: torch.vmap(lambda a: a + torch.rand(4), randomness="different")(x))
    assert axes
    assert not any(axis.is_plain for axis in axes)


def test_a_gradient_closes_what_is_around_it_and_inside_of_it() -> None:
    def outside(x: Tensor) -> Tensor:
        return torch.vmap(torch.func.grad(lambda a: (a * a).sum()))(x)

    def inside(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: torch.vmap(lambda a: a * a)(y).sum())(x)

    for function in (outside, inside):
        axes = _axes(function, X.float())
        assert axes
        assert not any(axis.is_plain for axis in axes)


def test_a_map_that_computes_nothing_gives_back_the_memory_that_it_was_given() -> None:
    def function(x: Tensor) -> Tensor:
        rows = x + 1
        turned = torch.vmap(lambda row: row, in_dims=1, out_dims=0)(rows)
        return turned + torch.vmap(lambda row: row * 2, in_dims=1)(rows)

    mirror = mirror_of(function, X)
    rows = next(n for n in mirror.graph.nodes if n.target is torch.ops.aten.add.Tensor)
    turned, doubled = (n for n, axis in mirror.vmap_axes.items() if not axis.added)
    assert mutation.storages(turned) == mutation.storages(rows)
    assert mutation.storages(doubled) != mutation.storages(rows)
    assert turned.meta["val"].shape == (4, 3)


def test_an_element_index_inside_of_a_map_is_a_gather() -> None:
    def function(x: Tensor) -> Tensor:
        rows, columns = torch.arange(3), torch.arange(4)
        both = torch.vmap(torch.vmap(lambda i, j: x[i, j] + x[0, j] + x[i][j], in_dims=(None, 0)), in_dims=(0, None))
        return both(rows, columns)

    targets = [node.target for node in mirror_of(function, X).graph.nodes]
    assert targets.count(torch.ops.aten.index.Tensor) == 4
