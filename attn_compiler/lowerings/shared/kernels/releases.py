"""Code that differs from one release of Triton to the next, for all our kernels. No line is for one release alone.

A difference is detected by the attributes or values that Triton has, and never by its version number. Differences of Gluon alone:
releases_sm90.py.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.language.core import TRITON_BUILTIN


def members(how: Any, _semantic: Any = None) -> Any:
    """Make each member of a tuple of constants a constant: `how: tl.constexpr = members(HOW)`.

    Triton 3.6 and 3.7 pass a kernel one constant that holds the tuple. A member of that is a Python int, which can't be the length of a
    tile. Since 3.8 each member is a constant by itself. A tuple that one kernel passes to another is a constant in all releases. The
    interpreter takes Python's own numbers.
    """
    given = how.value if isinstance(how, tl.constexpr) else how
    if _semantic is None or isinstance(given, tl.tuple):
        return given
    values = [tl.constexpr(value) for value in given]
    return tl.tuple(values, tl.tuple_type([value.type for value in values], given._fields))


def of_tile(condition: Any, _semantic: Any = None) -> Any:
    """Return a comparison of scalars in a form that can be combined with comparisons of a tile: `inside & of_tile(first <= last)`.

    In Triton 3.9's interpreter such a comparison has its operands' type, once it is spread over a tile, and no load takes it as a mask.
    Compiled kernels get it unchanged.
    """
    if _semantic is not None or not isinstance(condition, tl.tensor):
        return condition
    kept = type(condition.handle)(condition.handle.data, tl.int1)
    return tl.tensor(kept, tl.int1)


# With Triton's own decorator the interpreter would refuse these functions.
for _function in (members, of_tile):
    setattr(_function, TRITON_BUILTIN, True)
