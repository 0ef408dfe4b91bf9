"""The order in which sums and junctions hold their terms: that of how they are written as data, which no spelling of a mask changes."""

from __future__ import annotations

import dataclasses
from typing import Any

from attn_compiler.index_expr.nodes import Expr

#: characters that two terms are told apart by; those that begin alike for so long stand in the order of their digests
_FAR_ENOUGH = 1000


def place(x: Expr) -> tuple[str, bytes]:
    """What to sort terms by. Takes no longer for a large expression than for one of a thousand characters."""
    if "place" not in x.remembered:
        x.remembered["place"] = beginning(x, _FAR_ENOUGH), x.facts.digest
    found: tuple[str, bytes] = x.remembered["place"]
    return found


def beginning(x: Expr, most: int) -> str:
    """The first characters of str(x)."""
    written: list[str] = []
    length = 0
    left: list[Any] = [x]
    while left and length < most:
        item = left.pop()
        if not isinstance(item, str):
            left += reversed(_written(item))
            continue
        written.append(item)
        length += len(item)
    return "".join(written)[:most]


def _written(item: Any) -> list[Any]:
    """An expression, or a tuple of them, as Python writes it: words, and what is still to be written between them."""
    if isinstance(item, tuple):
        inside = [piece for part in item for piece in (", ", part)][1:]
        return ["(", *inside, ",)" if len(item) == 1 else ")"]
    if not dataclasses.is_dataclass(item):
        return [repr(item)]
    pieces: list[Any] = []
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        pieces += [
            ", ",
            f"{field.name}=",
            value if isinstance(value, tuple) or dataclasses.is_dataclass(value) else repr(value),
        ]
    return [f"{type(item).__name__}(", *pieces[1:], ")"]
