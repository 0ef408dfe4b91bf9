"""Exchanges, masks that are lost, and what follows of them."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler import ContextParallel
from attn_compiler.context_parallel import collectives as torch_collectives, rank_sync
from attn_compiler.passes.context_parallel import exchanging, following, lost_masks
from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.passes.context_parallel.following import Following
from attn_compiler.passes.context_parallel.places import CannotShard, Mixes, Place
from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests.lowerings.emitting import GraphEmitter
from tests.passes.compiling import mark, mirror_of
from tests.passes.context_parallel import compiled

# How q meets keys of other ranks.
B, H, HKV, N, D, DV = 2, 4, 2, 6, 8, 4
SIZE = 2


def _gathered(x: Tensor, axis: int, size: int, balanced: bool, group: str) -> Tensor:
    return torch.cat([x] * size, axis)


def _to_heads(x: Tensor, size: int, balanced: bool, group: str) -> Tensor:
    """Rank 0's: the first heads of each rank, which are those of this one."""
    return torch.cat([x[:, : x.shape[1] // size]] * size, 2)


@pytest.fixture(autouse=True)
def _equal_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_collectives, "gathered_sequence", _gathered)
    monkeypatch.setattr(torch_collectives, "heads_for_positions", _to_heads)
    monkeypatch.setattr(torch_collectives, "rank_of", lambda group: 0)


def _met(method: Any, *operands: Tensor) -> tuple[Any, dict[str, Tensor], list[object]]:
    """What is met, the values of q, k, v and queries, and the collectives."""
    builder = GraphEmitter(fx.Graph())
    nodes = []
    for x in operands:
        node = builder.graph.placeholder("x")
        node.meta["example_value"] = x
        nodes.append(node)
    met = method(builder, GraphLayout(size=SIZE, group="g", is_balanced=False), *nodes)
    values = {name: builder.value(getattr(met, name)) for name in ("q", "k", "v", "queries")}
    collectives = [n.target for n in builder.graph.nodes if n.target in (_gathered, _to_heads)]
    return met, values, collectives


def _qkv(**dtypes: torch.dtype) -> list[Tensor]:
    shapes = {"q": (B, H, N, D), "k": (B, HKV, N, D), "v": (B, HKV, N, DV)}
    return [torch.randn(shape).to(dtypes.get(name, torch.float32)) for name, shape in shapes.items()]


def test_keys_and_values_of_one_dtype_are_gathered_at_once() -> None:
    q, k, v = _qkv()
    met, values, collectives = _met(exchanging.gather, q, k, v)
    assert len(collectives) == 1
    assert values["q"] is q
    assert torch.equal(values["k"], torch.cat([k, k], 2))
    assert torch.equal(values["v"], torch.cat([v, v], 2))
    assert torch.equal(values["queries"], torch.arange(N))
    assert met.first_head is None
    assert met.bytes == (SIZE - 1) * 4 * (k.numel() + v.numel())


def test_two_dtypes_are_gathered_apart() -> None:
    q, k, v = _qkv(v=torch.float16)
    met, values, collectives = _met(exchanging.gather, q, k, v)
    assert len(collectives) == 2
    assert torch.equal(values["v"], torch.cat([v, v], 2))
    assert met.bytes == 4 * k.numel() + 2 * v.numel()


@pytest.mark.parametrize(
    ("head_dim_v", "dtypes", "expected"),
    [(D, {}, 1), (DV, {}, 2), (D, {"k": torch.float16}, 3), (D, {"v": torch.float16}, 2)],
)
def test_neighbours_that_are_alike_are_exchanged_at_once(
    head_dim_v: int, dtypes: dict[str, torch.dtype], expected: int
) -> None:
    q, k, v = _qkv(**dtypes)
    v = torch.randn(B, HKV, N, head_dim_v).to(v.dtype)
    met, values, collectives = _met(exchanging.exchange, q, k, v)
    assert len(collectives) == expected
    for name, x in zip("qkv", (q, k, v), strict=True):
        assert torch.equal(values[name], torch.cat([x[:, : x.shape[1] // SIZE]] * SIZE, 2)), name
    assert torch.equal(values["queries"], torch.arange(SIZE * N))
    assert int(met.first_head.meta["example_value"]) == 0
    # q goes there and comes back as the output; a rank keeps its own share.
    sent = sum(x.numel() * x.element_size() for x in (q, k, v, q))
    assert met.bytes == sent // 2


def test_the_first_head_is_the_rank_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_collectives, "rank_of", lambda group: 1)
    met, _, _ = _met(exchanging.exchange, *_qkv())
    assert int(met.first_head.meta["example_value"]) == H // SIZE


# Masks that code around a graph made of a part of the sequence.

#: within the sequence of two ranks, and wider than a rank's part
WINDOW = compiled.LENGTH + 7


def _config(**given: Any) -> Any:
    return types.SimpleNamespace(**given)


_TYPES = ["full_attention", "sliding_attention", "chunked_attention"]
TOLD: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing": ({}, None),
    "a configuration without one": ({"config": _config(sliding_window=None)}, None),
    "for all layers": ({"config": _config(sliding_window=9)}, ("sliding_window", 9)),
    "the module's own": ({"config": _config(sliding_window=9), "sliding_window": 10}, ("sliding_window", 10)),
    "the module has none": ({"config": _config(sliding_window=9), "sliding_window": None}, None),
    "a full layer": ({"config": _config(sliding_window=9, layer_types=_TYPES), "layer_idx": 0}, None),
    "a sliding layer": (
        {"config": _config(sliding_window=9, layer_types=_TYPES), "layer_idx": 1},
        ("sliding_window", 9),
    ),
    "a chunked layer": (
        {"config": _config(attention_chunk_size=8, sliding_window=9, layer_types=_TYPES), "layer_idx": 2},
        ("attention_chunk_size", 8),
    ),
    "chunks": ({"config": _config(attention_chunk_size=8)}, ("attention_chunk_size", 8)),
    "a switch": ({"config": _config(sliding_window=True)}, None),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_a_module_says(name: str) -> None:
    given, expected = TOLD[name]
    assert lost_masks.named_window(_config(**given)) == expected


class Layer(nn.Module):
    """Compiled by itself. windowed: whether it makes its own mask."""

    def __init__(self, windowed: bool, **config: Any) -> None:
        super().__init__()
        self.attention = Attention(windowed, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x)
        return found


class Attention(nn.Module):
    def __init__(self, windowed: bool, config: dict[str, Any]) -> None:
        super().__init__()
        self.q, self.windowed = nn.Linear(compiled.WIDTH, compiled.WIDTH), windowed
        self.layer_idx = config.pop("layer_idx", 0)
        self.config = _config(**config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (compiled.HEADS, -1)).transpose(1, 2)
        at = torch.arange(x.shape[1])
        distance = at[:, None] - at[None, :]
        mask = (distance >= 0) & (distance < WINDOW) if self.windowed else None
        out = scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).flatten(2)


def _run(*layers: Layer, **description: Any) -> None:
    with compiled.fresh_mesh() as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sync, "agree", lambda *_, **__: None)
        options = {"context_parallel": ContextParallel(mesh, **description), "inner": "eager"}
        for layer in layers:
            layer.compile(backend="attn_compiler", options=options, fullgraph=True)
            layer(torch.randn(compiled.BATCH, compiled.LENGTH, compiled.WIDTH))


def test_a_window_that_a_mask_does_not_have_is_refused() -> None:
    with pytest.raises(
        ContextParallelUnsupported, match=rf"sliding_window is {WINDOW} of {2 * compiled.LENGTH} positions"
    ):
        _run(Layer(False, sliding_window=WINDOW))
    _run(Layer(False, sliding_window=WINDOW), allow=("window",))


def test_a_window_that_a_mask_has_or_that_holds_all_is_none() -> None:
    _run(Layer(True, sliding_window=WINDOW))
    _run(Layer(False, sliding_window=2 * compiled.LENGTH))


@pytest.mark.parametrize("first", [0, 1])
def test_code_of_a_full_layer_does_not_serve_one_with_a_window(first: int) -> None:
    """Both layers have one graph."""
    kinds = ["full_attention", "sliding_attention"]
    layers = [Layer(False, sliding_window=WINDOW, layer_types=kinds, layer_idx=i) for i in (first, 1 - first)]
    with pytest.raises(ContextParallelUnsupported, match="the window that its module names"):
        _run(*layers)


def test_documents_that_a_mask_does_not_read_are_refused() -> None:
    with pytest.raises(ContextParallelUnsupported, match="packed documents reads where they begin"):
        compiled.compile_and_run(packed=True)


def test_documents_that_a_mask_reads_are_taken() -> None:
    def attend(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Any) -> torch.Tensor:
        document = (data["position_ids"] == 0).long().cumsum(-1)
        mask = (document[:, None, :, None] == document[:, None, None, :]).tril()
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    compiled.compile_and_run(attend=attend, data={"position_ids": compiled.positions() % 7}, packed=True)


# Which inputs are cut, and where values hold the sequence.
def test_inputs_are_cut_along_their_positions() -> None:
    graph = compiled.graph_of(
        l_ids_=torch.zeros(2, 8).long(),
        l_mask_=torch.zeros(8).bool(),
        l_spans_=torch.zeros(2, 3, 8).long(),
        l_hidden_=torch.zeros(2, 8, 16),
    )
    found = following.inputs(graph, ())
    assert {node.name: (one.axis, one.length) for node, one in found.items()} == {
        "l_ids_": (1, 8), "l_mask_": (0, 8), "l_spans_": (2, 8), "l_hidden_": (1, 8)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("l_number_", 7),
        ("l_table_", torch.zeros(9, 16)),
        ("l_image_", torch.zeros(2, 3, 8, 8)),
        ("l_one_", torch.zeros(2, 1, 16)),
        ("l_scalar_", torch.tensor(3)),
        ("l_x_", nn.Parameter(torch.zeros(2, 8, 16))),
        ("l_self_modules_norm_parameters_weight_", torch.zeros(2, 8, 16)),
        ("l_kept_", torch.zeros(2, 8, 16)),
    ],
)
def test_what_every_rank_has_is_not_cut(name: str, value: Any) -> None:
    assert following.inputs(compiled.graph_of(**{name: value}), ("kept",)) == {}


@pytest.mark.parametrize(
    ("name", "is_meant"),
    [("l_kept_", True), ("l_data_kept_", True), ("kept", True), ("l_keptness_", False), ("l_unkept_", False)],
)
def test_a_name_is_a_whole_word(name: str, is_meant: bool) -> None:
    (node,) = compiled.graph_of(**{name: torch.zeros(2, 8)}).nodes
    assert following.is_named(node, ("kept",)) is is_meant


def test_a_symbolic_length_is_refused() -> None:
    graph: list[fx.Graph] = []
    mirror = mirror_of(lambda x: x * 2, mark(torch.zeros(2, 8, 16), [8]))
    for node in mirror.graph.nodes:
        dynamo = mirror.dynamo_node(node) if node.op == "placeholder" else None
        if dynamo is not None and isinstance(dynamo.meta["example_value"], Tensor):
            graph.append(dynamo.graph)
    with pytest.raises(CannotShard) as caught:
        following.inputs(graph[0], ())
    assert caught.value.reason.remedy == "compile with dynamic=False"


def _followed(function: Any, *inputs: Tensor, allowed: tuple[str, ...] = ()) -> tuple[Following, fx.Node]:
    """Of a function without attention; and the value that it gives."""
    mirror = mirror_of(function, *inputs)
    (output,) = mirror.graph.find_nodes(op="output")
    (out,) = output.all_input_nodes
    owners = [mirror.dynamo_node(n) for n in mirror.graph.nodes if n.op == "placeholder"]
    (graph,) = {n.graph for n in owners if n is not None}
    return Following(mirror, following.inputs(graph, ()), [], allowed), out


X = torch.zeros(2, 8, 16)


def test_the_sequence_is_followed_through_views() -> None:
    found, out = _followed(lambda x: x.view(2, 8, 4, 4).transpose(1, 2).cos(), X)
    assert found.holds(out)
    place = found.places[out]
    assert isinstance(place, Place)
    assert [any(atom in found.atoms for atom in dim) for dim in place.dims] == [False, False, True, False]


def test_what_is_made_of_no_input_holds_none() -> None:
    found, out = _followed(lambda x: x.new_ones(2, 8, 16).cumsum(1), X)
    assert not found.holds(out)
    assert found.looks_like_part(out)


def test_what_mixes_is_told_to_all_that_reads_it() -> None:
    found, out = _followed(lambda x: x.flip(1).cos().exp(), X)
    mixed = found.places[out]
    assert isinstance(mixed, Mixes)
    assert "flip" in str(mixed.at.target)
    assert not found.holds(out)
    assert not found.holds_still(out)
    error = following.refused(mixed)
    assert "flip" in error.reason.observed
    assert "allow=('aten.flip.default',)" in str(error.reason.remedy)
    assert error.at is mixed.at


def test_an_op_that_the_user_answers_for_lies_as_its_operand() -> None:
    found, out = _followed(lambda x: x.flip(1).cos(), X, allowed=("aten.flip.default",))
    assert found.holds_still(out)


def _by_length(factor: float) -> compiled.Before:
    return lambda model, x, data: x * factor


def test_a_factor_that_looks_like_the_length_is_refused_unless_it_is_answered_for() -> None:
    with pytest.raises(ContextParallelUnsupported, match="may come from the length of a part"):
        compiled.compile_and_run(before=_by_length(1 / compiled.LENGTH))
    compiled.compile_and_run(before=_by_length(1 / compiled.LENGTH), allow=("length",))
    compiled.compile_and_run(before=_by_length(0.3))
