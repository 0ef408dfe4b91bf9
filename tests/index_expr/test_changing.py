from __future__ import annotations

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.index_expr.changing import rename, with_parts

K, Q = Index("k"), Index("q")


def test_parts_are_changed_and_the_form_is_normal_again() -> None:
    form = ix.add(ix.mul(K, Const(2)), Q)
    assert with_parts(form, lambda part: Q) == ix.mul(Q, Const(3))
    assert with_parts(ix.compare("<=", K, Q), lambda part: Const(-1)) == ix.FALSE
    assert with_parts(ix.where(ix.compare("<=", K, Q), K, Q), lambda part: Const(1)) == Const(1)
    assert with_parts(K, lambda part: Q) == K


def test_loads_are_renamed_wherever_they_stand() -> None:
    inner = Load("index", (Q, K), "int")
    x = ix.mul(Load("table", (ix.add(inner, Const(1)),), "float"), Load("scale", (), "float"))
    renamed = rename(x, lambda name: name.upper())
    assert {load.tensor for load in ix.loads(renamed)} == {"TABLE", "INDEX", "SCALE"}
    assert rename(renamed, lambda name: name.lower()) == x
