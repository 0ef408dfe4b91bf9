from __future__ import annotations

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load, Size
from attn_compiler.spec import added_scores, masks, reads
from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.spec.masks import MaskKind

B, H, Q, K = map(Index, "bhqk")
LENGTH = Load("length", (B,), "int")
PADDING = ix.as_bool(Load("attention_mask", (B, Load("order", (K,), "int")), "int"))


@pytest.mark.parametrize(
    ("kind", "tensors", "sizes"),
    [
        (masks.Causal(), set(), set()),
        (masks.CausalFrom(offset=ix.add(Size("s1"), LENGTH)), {"length"}, {"s1"}),
        (masks.KeyPadding(condition=PADDING), {"attention_mask", "order"}, set()),
        (masks.Chunked(size=4, start=LENGTH), {"length"}, set()),
        (masks.AnyOf(alternatives=((masks.Causal(),), (masks.KeyPadding(condition=PADDING),))), {"attention_mask", "order"}, set()),
        (added_scores.RelativeBias(table="table", at=(ix.add(K, Q, -1), H), distance=ix.add(K, Q, -1)), {"table"}, set()),
        (added_scores.Bias(tensor="bias", at=(LENGTH, Size("s2")), shape=(1, 1, 1, 1)), {"bias", "length"}, {"s2"}),
    ],
)  # fmt: skip
def test_what_a_kind_reads(kind: MaskKind | ProvedScore, tensors: set[str], sizes: set[str]) -> None:
    assert reads.tensors(kind) == tensors
    assert reads.sizes(kind) == sizes
    assert reads.names(kind) == tensors | sizes


def test_what_an_expression_reads() -> None:
    assert reads.names_in(ix.add(LENGTH, Size("s3"))) == {"length", "s3"}
