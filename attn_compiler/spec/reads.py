"""Run-time tensors and symbolic sizes that a proved kind of a mask or of a score reads, by name."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator
from typing import Any

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index
from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.masks import MaskKind

_EXPRESSIONS: tuple[type[Any], ...] = typing.get_args(ix.Expr)

#: fields of score kinds that name a tensor
_NAMES = ("table", "tensor")


def expressions(kind: MaskKind | ProvedScore | Chosen) -> Iterator[Expr]:
    """Yield every index expression in a kind, and in the kinds that it is made of."""
    for field in dataclasses.fields(kind):
        yield from _expressions(getattr(kind, field.name))


def tensors(kind: MaskKind | ProvedScore | Chosen) -> frozenset[str]:
    """Return the names of the tensors that a kind loads from."""
    named = {getattr(kind, field.name) for field in dataclasses.fields(kind) if field.name in _NAMES}
    return frozenset(named) | {load.tensor for x in expressions(kind) for load in ix.loads(x)}


def sizes(kind: MaskKind | ProvedScore | Chosen) -> frozenset[str]:
    """Return the names of the symbolic sizes in a kind's expressions."""
    return frozenset(name for x in expressions(kind) for name in ix.sizes(x))


def names(kind: MaskKind | ProvedScore | Chosen) -> frozenset[str]:
    """Return the names needed to evaluate a kind: its tensors and its sizes."""
    return tensors(kind) | sizes(kind)


def is_over_pairs(x: Expr) -> bool:
    """Return whether an expression loads from a tensor with an axis for queries and another one for keys."""
    return any(
        any(ix.mentions(q, Index("q")) and ix.mentions(k, Index("k")) for q, k in itertools.permutations(load.at, 2))
        for load in ix.loads(x)
    )


def names_in(x: Expr) -> frozenset[str]:
    """Return the names needed to evaluate one expression."""
    return frozenset(load.tensor for load in ix.loads(x)) | ix.sizes(x)


def _expressions(value: Any) -> Iterator[Expr]:
    if isinstance(value, _EXPRESSIONS):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _expressions(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _expressions(getattr(value, field.name))
