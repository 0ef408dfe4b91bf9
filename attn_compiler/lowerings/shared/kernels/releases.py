"""What is written in another way from one release of Triton to the next, for all our kernels. None has a line for a release of its own.

Each is told by what Triton has, or by what it hands over, and never by its number. What Gluon alone has: releases_sm90.py.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.language.core import TRITON_BUILTIN


def members(how: Any, _semantic: Any = None) -> Any:
    """A tuple of constants, of which each member is one: `how: tl.constexpr = members(HOW)`.

    Triton 3.6 and 3.7 hand a kernel one constant that holds the tuple. A member of that is a Python int, which is no length of a tile.
    Since 3.8 each member is a constant by itself. A tuple that a kernel hands to a further one is a constant in all of them. The
    interpreter takes Python's own numbers.
    """
    given = how.value if isinstance(how, tl.constexpr) else how
    if _semantic is None or isinstance(given, tl.tuple):
        return given
    values = [tl.constexpr(value) for value in given]
    return tl.tuple(values, tl.tuple_type([value.type for value in values], given._fields))


def of_tile(condition: Any, _semantic: Any = None) -> Any:
    """A comparison of single numbers that is to be put beside those of a tile: `inside & of_tile(first <= last)`.

    To Triton 3.9's interpreter such a comparison is of its operands' type, once it is spread over a tile, and no load takes it as a mask.
    Where kernels are compiled it stays as it is.
    """
    if _semantic is not None or not isinstance(condition, tl.tensor):
        return condition
    kept = type(condition.handle)(condition.handle.data, tl.int1)
    return tl.tensor(kept, tl.int1)


# Triton's own decorator would have the interpreter refuse them.
for _function in (members, of_tile):
    setattr(_function, TRITON_BUILTIN, True)
