"""Kernels of libraries: what is said of each op's arguments is so in its schema, and a call's arguments are found by their names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from attn_compiler.passes.graph import library_ops, opaque_calls
from attn_compiler.passes.graph.library_ops import OPS, given_arguments, is_off, kernel_in, unknown_argument
from tests import library_kernels


@pytest.fixture(autouse=True)
def _libraries() -> Iterator[None]:
    with library_kernels.installed():
        yield


def _overload(name: str) -> torch._ops.OpOverload:
    namespace, _, op = name.partition("::")
    found: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), op).default
    return found


@pytest.mark.parametrize("name", OPS)
def test_what_is_read_of_an_op_are_arguments_that_it_has(name: str) -> None:
    import torch.nn.attention.varlen  # noqa: F401 - defines one of the ops

    op, has = OPS[name], {argument.name for argument in _overload(name)._schema.arguments}
    named = op.known() - library_ops.HARMLESS - {""}
    # Arguments of other versions of the library may be missing here; q, k, v and the scale never are.
    assert {*op.qkv, op.scale} <= has
    assert len(named & has) >= len(named) - len(op.off)
    if op.bounds is not None:
        assert set(op.bounds) <= has


def test_every_op_is_one_of_a_known_library() -> None:
    for name in OPS:
        assert "an op of its own" not in opaque_calls.reason(name).observed


def _call(target: object, *more: object, **named: object) -> fx.Node:
    graph = fx.Graph()
    tensors = [graph.placeholder(name) for name in "qkv"]
    for node in tensors:
        node.meta["example_value"] = torch.empty(2, 8, 2, 8)
    return graph.call_function(target, (*tensors, *more), named)  # type: ignore[arg-type]


SETTINGS = (0.0, 0.3, True, -1, -1, 0.0, None, False)


def test_arguments_are_found_however_they_are_given() -> None:
    forward = torch.ops.flash_attn._flash_attn_forward
    by_place = _call(forward, *SETTINGS)
    by_name = _call(
        forward.default,
        *SETTINGS[:3],
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    )
    for node in (by_place, by_name):
        given = given_arguments(node)
        assert isinstance(given, dict)
        assert (given["q"], given["softmax_scale"], given["causal"]) == (node.args[0], 0.3, True)
        assert set(given) == {argument.name for argument in forward.default._schema.arguments}


def test_defaults_are_filled_in() -> None:
    varlen = torch.ops.flash_attn._flash_attn_varlen_forward
    graph = _call(varlen)
    bounds = graph.graph.placeholder("bounds")
    given = given_arguments(_call(varlen, bounds, bounds, 9, 9, 0.0, 0.3, True))
    assert isinstance(given, dict)
    assert (given["window_size_left"], given["zero_tensors"], given["block_table"]) == (-1, False, None)


@pytest.mark.parametrize(
    ("more", "named", "why"),
    [((*SETTINGS, 1), {}, "those of another overload"), (SETTINGS, {"sink": None}, "those of another overload")],
)
def test_arguments_of_another_version_are_not_guessed(
    more: tuple[object, ...], named: dict[str, object], why: str
) -> None:
    assert why in str(given_arguments(_call(torch.ops.flash_attn._flash_attn_forward, *more, **named)))


def test_another_overload_is_another_attention() -> None:
    node = _call(torch.ops.aten._flash_attention_forward.quantized)
    assert given_arguments(node) == "its overload quantized is another attention"


def test_an_argument_that_nobody_knows_may_have_its_default() -> None:
    with torch.library._scoped_library("test_library_ops", "FRAGMENT") as library:
        library.define("attn_fwd(Tensor q, Tensor k, Tensor v, float scale, int parts=1, Tensor? sink=None) -> Tensor")
        op, known = torch.ops.test_library_ops.attn_fwd, frozenset({"q", "k", "v", "scale"})
        for more, name in (((0.3,), None), ((0.3, 1, None), None), ((0.3, 2), "parts"), ((0.3, 1, 5.0), "sink")):
            node = _call(op, *more)
            given = given_arguments(node)
            assert isinstance(given, dict)
            assert unknown_argument(node, given, known) == name
        given = given_arguments(_call(op, 0.3))
        assert isinstance(given, dict)
        assert unknown_argument(_call(op, 0.3), given, frozenset({"q", "k", "v"})) == "scale"


@pytest.mark.parametrize(
    ("value", "is_nothing"), [(None, True), (False, True), (0, True), (0.0, True), (1, False), (-1, False)]
)
def test_what_asks_for_nothing(value: object, is_nothing: bool) -> None:
    assert is_off(value) is is_nothing


def test_a_kernel_is_one_of_the_ops() -> None:
    node = _call(torch.ops.flash_attn._flash_attn_forward, *SETTINGS)
    assert kernel_in(node) is node
    assert kernel_in(_call(torch.ops.aten.baddbmm.default)) is None
    assert kernel_in(node.all_input_nodes[0]) is None
