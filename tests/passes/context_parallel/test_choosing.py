"""How the queries of an attention meet other ranks' keys: as asked, or by what sends the least."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.context_parallel.description import GATHER_LIMIT
from attn_compiler.index_expr import Const, Expr, Index
from attn_compiler.passes.context_parallel import choosing
from attn_compiler.passes.context_parallel.layout import GraphLayout
from attn_compiler.passes.context_parallel.refusing import CannotShard
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, make_spec

CPU, HOPPER = Target.fake(device="cpu"), Target.fake()


def _site(**changed: Any) -> Any:
    match = SimpleNamespace(out="out", scores=SimpleNamespace(limits=()), axes=SimpleNamespace(query=()))
    given = {"condition": None, "loads": {}, "score_loads": {}} | changed
    return SimpleNamespace(match=match, keyless=None, **given)


def _window(keys: int) -> Expr:
    near = ix.compare(">=", ix.add(Index("k"), Const(keys - 1)), Index("q"))
    return ix.apply("and", ix.compare("<=", Index("k"), Index("q")), near)


def _choice(
    spec: AttentionSpec, asked: str, size: int, limit: int = GATHER_LIMIT, target: Target = CPU, **site: Any
) -> choosing.MethodChoice:
    cp: Any = SimpleNamespace(method=asked, size=size, gather_limit=limit)
    layout = GraphLayout(size=size, group="", is_balanced=False)
    return choosing.choice(_site(**site), spec, cp, layout, target)


@pytest.mark.parametrize(
    ("heads", "heads_kv", "asked", "size", "method"),
    [
        (8, 8, "auto", 4, "all_to_all"),
        (8, 2, "auto", 2, "all_to_all"),
        (8, 2, "auto", 4, "all_gather"),
        (6, 6, "auto", 4, "all_gather"),
        (8, 8, "all_gather", 4, "all_gather"),
        ("s0", 8, "auto", 4, "all_gather"),
        (8, 2, "ring", 2, "ring"),
    ],
)
def test_heads_are_exchanged_where_they_can_be_shared_out(
    heads: Any, heads_kv: Any, asked: str, size: int, method: str
) -> None:
    assert _choice(make_spec(heads=heads, heads_kv=heads_kv), asked, size).method == method


def test_keys_and_values_are_gathered_up_to_a_limit() -> None:
    spec = make_spec(batch=2, heads=8, heads_kv=2, seqlen_q=128, seqlen_kv=128, head_dim=64, head_dim_v=32)
    whole = 4 * 2 * 2 * 128 * (64 + 32) * 2
    assert choosing.gathered_bytes(spec, 4) == whole
    assert _choice(spec, "auto", 4, whole) == choosing.MethodChoice(method="all_gather")
    over = _choice(spec, "auto", 4, whole - 1)
    assert over.method == "ring"
    assert over.why is not None
    assert "gather_limit" in over.why
    assert _choice(spec, "auto", 2, 0).method == "all_to_all"
    assert _choice(spec, "all_gather", 4, 0).method == "all_gather"
    assert choosing.gathered_bytes(make_spec(batch="s0"), 4) == 0


def test_heads_that_can_not_be_shared_out_are_not_exchanged() -> None:
    with pytest.raises(CannotShard) as caught:
        _choice(make_spec(heads=8, heads_kv=2), "all_to_all", 4)
    assert caught.value.reason.observed == "8 and 2 heads for 4 ranks"


@pytest.mark.parametrize(
    ("heads_kv", "size", "method"), [(8, 2, "all_gather"), (8, 8, "all_to_all"), (32, 2, "all_to_all")]
)
@pytest.mark.parametrize("grad", [False, True])
def test_few_keys_are_gathered_on_hopper_where_that_sends_less(
    heads_kv: int, size: int, method: str, grad: bool
) -> None:
    """32 heads of q. With a backward keys travel three times, and all operands twice."""
    spec = make_spec(heads=32, heads_kv=heads_kv, seqlen_q=1024, seqlen_kv=1024, mask=CAUSAL, needs_grad=grad)
    found = _choice(spec, "auto", size, target=HOPPER)
    assert found.method == method
    assert (found.why is None) == (method == "all_to_all")
    # Where rows of intervals were not measured, and where a mask reads tensors, each attention is left as it was.
    assert _choice(spec, "auto", size).method == "all_to_all"
    assert _choice(spec, "auto", size, target=HOPPER, loads={"documents": None}).method == "all_to_all"


def test_a_halo_that_sends_less_comes_before_heads() -> None:
    spec = make_spec(heads=8, heads_kv=8, seqlen_q=1024, seqlen_kv=1024)
    near = _choice(spec, "auto", 2, condition=_window(64))
    assert near.method == "all_gather"
    assert near.why is not None
    assert _choice(spec, "auto", 2, condition=_window(1024 * 2)).method == "all_to_all"
    assert _choice(spec, "all_to_all", 2, condition=_window(64)).method == "all_to_all"
