from __future__ import annotations

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load, Size
from attn_compiler.spec.mask_inputs import Inputs

B, H, Q, K = map(Index, "bhqk")
PADDING = Load("padding", (B, K), "int")


def test_an_expression_has_the_numbers_of_a_pair() -> None:
    inputs = Inputs(seqlen_q=4, seqlen_kv=6, load=lambda tensor, at: 100 + sum(at), sizes={"s0": 7})
    assert inputs.value(ix.add(PADDING, Size("s0")), 1, 0, 2, 3) == 111
    assert inputs.value(ix.add(ix.add(H, Q), K), 1, 5, 2, 3) == 10


def test_a_tensor_that_was_not_given_is_an_error_that_names_it() -> None:
    with pytest.raises(LookupError, match=r"reads padding\[0, 3\]"):
        Inputs(seqlen_q=4, seqlen_kv=4).value(PADDING, 0, 0, 2, 3)


def test_a_size_that_was_not_given_is_an_error_that_names_it() -> None:
    with pytest.raises(LookupError, match="s0"):
        Inputs(seqlen_q=4, seqlen_kv=4).value(Size("s0"), 0, 0, 2, 3)
