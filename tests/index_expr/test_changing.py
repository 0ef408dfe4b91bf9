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


def test_a_load_gets_its_new_name_once() -> None:
    """Where the new name of one tensor is the old one of another, a load that is renamed twice reads the other tensor."""
    names = {"add_2": "add", "add": "add'"}
    x = ix.compare(">=", Load("add_2", (K,), "int"), Const(0))
    assert {load.tensor for load in ix.loads(x)} == {"add_2"}
    assert {load.tensor for load in ix.loads(rename(x, names.__getitem__))} == {"add"}
    both = ix.compare(">=", Load("add_2", (K,), "int"), Load("add", (Q,), "int"))
    assert {load.tensor: load.at for load in ix.loads(rename(both, names.__getitem__))} == {"add": (K,), "add'": (Q,)}
