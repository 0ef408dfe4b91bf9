"""When attention over the latent costs less than to make k and v, and the products around it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.shared.parts import latents
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec, LatentSpec, TensorSpec
from tests.lowerings.emitting import GraphEmitter
from tests.lowerings.specs import make_spec, words


def _latent(rank: int | str = 512, rope: int = 64, nope: int = 128, keys: int = 4096, **more: Any) -> LatentSpec:
    def tensor(width: int | str) -> TensorSpec:
        return TensorSpec(shape=(1, 1, keys, width), strides=("s9", "s8", "s7", 1), dtype="bfloat16")

    return LatentSpec(latent=tensor(rank), rope=tensor(rope) if rope else None, nope=nope, **more)


def _spec(
    *, latent: LatentSpec | None, queries: int | str = 1, keys: int | str = 4096, heads: int | str = 16
) -> AttentionSpec:
    spec = make_spec(
        batch=1,
        heads=heads,
        heads_kv=heads,
        seqlen_q=queries,
        seqlen_kv=keys,
        head_dim=192,
        head_dim_v=128,
        needs_grad=False,
    )
    return dataclasses.replace(spec, latent=latent)


def _products(spec: AttentionSpec, latent: LatentSpec) -> tuple[float, float]:
    """Products a key: to make k and v and use them, and over the latent."""
    heads, rank, made = 16, int(latent.rank), 128 + latent.nope
    queries, keys = int(spec.seqlen_q), int(spec.seqlen_kv)
    return (
        rank * heads * made + heads * queries * made,
        heads * queries * 2 * rank + rank * heads * made * queries / keys,
    )


@pytest.mark.parametrize("keys", [200, 4096, 1_000_000])
def test_the_crossover_is_where_both_ways_cost_the_same(keys: int) -> None:
    latent = _latent(keys=keys)
    at = latents.crossover(_spec(latent=latent, keys=keys), latent)
    for queries, is_less in ((math.ceil(at) - 1, True), (math.floor(at) + 1, False)):
        make, over = _products(_spec(latent=latent, queries=queries, keys=keys), latent)
        assert (over < make) is is_less


def test_a_small_latent_always_costs_less() -> None:
    latent = _latent(rank=16, keys=1_000_000_000)
    assert latents.crossover(_spec(latent=latent, keys="s0"), latent) == math.inf
    assert latents.crossover(_spec(latent=_latent(rank="s1")), _latent(rank="s1")) == 0.0


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({}, ""),
        ({"queries": latents.MOST_QUERIES}, ""),
        ({"queries": latents.MOST_QUERIES + 1}, "at most 16 queries"),
        ({"queries": "s0"}, "observed seqlen_q s0"),
        # As many products to make k and v of 9 keys as 9 queries over the latent take.
        ({"queries": 9, "keys": 9}, "fewer than 9: from there on"),
        ({"heads": "s0"}, "observed num_heads_q s0"),
        ({"latent": _latent(rank="s1")}, "rank s1"),
        ({"latent": None}, "they are not made of one in this graph"),
    ],
)
def test_what_speaks_against_it(changed: dict[str, Any], rule: str) -> None:
    found = words(latents.check_latent(_spec(**{"latent": _latent(), **changed})))
    assert rule in found
    assert bool(rule) == bool(found)


def test_why_there_is_no_latent_is_what_was_seen() -> None:
    spec = _spec(latent=None)
    reason = Reason(code=latents.check_latent(spec)[0].code, rule="k is made of one tensor", observed="of two")
    assert latents.check_latent(dataclasses.replace(spec, no_latent=reason)) == [reason]


def test_people_are_told_of_bytes() -> None:
    text = latents.note(_spec(latent=_latent()), _latent())
    assert "512 + 64 numbers of each key, 1152 bytes, in place of 5120, 10240 bytes" in text


class _Nodes:
    """Nodes with values that are not fake, so that what they compute is seen."""

    def __init__(self) -> None:
        self.emitter = GraphEmitter(fx.Graph())

    def given(self, value: torch.Tensor) -> fx.Node:
        node = self.emitter.graph.placeholder("x")
        node.meta["example_value"] = value
        return node

    def value(self, node: fx.Node) -> torch.Tensor:
        return self.emitter.value(node)


@pytest.mark.parametrize("nope_first", [True, False])
def test_q_is_cut_where_k_is(nope_first: bool) -> None:
    nodes, q = _Nodes(), torch.randn(1, 2, 3, 192)
    latent = _latent(nope_first=nope_first)
    nope, rope = latents.parts_of_q(nodes.emitter, latent, nodes.given(q))
    assert rope is not None
    assert torch.equal(nodes.value(nope), q[..., :128] if nope_first else q[..., 64:])
    assert torch.equal(nodes.value(rope), q[..., 128:] if nope_first else q[..., :64])
    nope, rope = latents.parts_of_q(nodes.emitter, _latent(rope=0, nope=192), nodes.given(q))
    assert rope is None
    assert torch.equal(nodes.value(nope), q)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 3, 5, 4, 7), (2, 3, 1, 4, 2)], ids=str)
def test_each_head_has_a_matrix(shape: tuple[int, ...]) -> None:
    batch, heads, queries, inner, outer = shape
    nodes, x, weight = _Nodes(), torch.randn(batch, heads, queries, inner), torch.randn(heads, inner, outer)
    found = latents.by_heads(nodes.emitter, nodes.given(x), nodes.given(weight))
    torch.testing.assert_close(nodes.value(found), torch.einsum("bhqi,hio->bhqo", x, weight))


def test_a_site_without_a_latent_has_no_nodes_of_one() -> None:
    q = _Nodes().given(torch.zeros(1))
    with pytest.raises(ValueError, match="no latent"):
        latents.given(Operands(q=q, k=q, v=q))
