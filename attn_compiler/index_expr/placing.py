"""The order of terms in sums and junctions: by their text as data, which no spelling of a mask changes."""

from __future__ import annotations

import dataclasses
from typing import Any

from attn_compiler.index_expr.nodes import Expr

#: characters that terms are sorted by; terms with equal beginnings of this length are sorted by digest
_FAR_ENOUGH = 1000


def place(x: Expr) -> tuple[str, bytes]:
    """Return the sort key of a term. A large expression costs no more than one of a thousand characters."""
    if "place" not in x.remembered:
        x.remembered["place"] = beginning(x, _FAR_ENOUGH), x.facts.digest
    found: tuple[str, bytes] = x.remembered["place"]
    return found


def beginning(x: Expr, most: int) -> str:
    """Return the first characters of str(x)."""
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
    """Return an expression, or a tuple of them, as Python prints it: words, and items still to be printed between them."""
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
