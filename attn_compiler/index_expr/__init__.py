"""The language of masks and biases: expressions over the indices (b, h, q, k) of a score. Pure data.

Expressions are built by `apply` and its relatives only, which keep a normal form. Numbers are folded, integer arithmetic is a linear form,
an integer comparison is one of `form >= 0`, `form == 0`, `form != 0`, and conjunctions are flat and sorted. So two spellings of one mask
give equal expressions, and `evaluate` computes an expression on real numbers and tensors.

Five normal forms, where a linear form is written as a sum:

    k <= q                      Test(">=", q - k)
    q - 8 < k                   Test(">=", k - q + 7)
    (q - k) % 4 == 0            Test("==", Apply("mod", q - k, 4))
    k // 64 == q // 64          Test("==", Apply("floordiv", k, 64) - Apply("floordiv", q, 64))
    ids[b, q] == ids[b, k]      Test("==", Load("ids", b, k) - Load("ids", b, q))

nodes.py: the data. building.py, linear_forms.py, comparing.py: the normal form. looking.py: queries. ranges.py: consequences of the
indices' ranges. meaning.py: values and text.
"""

from attn_compiler.index_expr.building import (
    add,
    apply,
    as_bool,
    as_float,
    as_int,
    invert,
    mul,
    rebuilt,
    substitute,
    test,
    where,
)
from attn_compiler.index_expr.comparing import compare
from attn_compiler.index_expr.linear_forms import combine, linear
from attn_compiler.index_expr.looking import is_exact, is_truth, loads, mentions, nonzero, ordered, parts, sizes
from attn_compiler.index_expr.meaning import evaluate, shortened, text
from attn_compiler.index_expr.nodes import (
    FALSE,
    ONE,
    OPS,
    TRUE,
    ZERO,
    Apply,
    Const,
    Expr,
    Index,
    Linear,
    Load,
    Size,
    Test,
    kind_of,
)
from attn_compiler.index_expr.ranges import Ranges, bounds, decide, lower_bound

__all__ = [
    "FALSE",
    "ONE",
    "OPS",
    "TRUE",
    "ZERO",
    "Apply",
    "Const",
    "Expr",
    "Index",
    "Linear",
    "Load",
    "Ranges",
    "Size",
    "Test",
    "add",
    "apply",
    "as_bool",
    "as_float",
    "as_int",
    "bounds",
    "combine",
    "compare",
    "decide",
    "evaluate",
    "invert",
    "is_exact",
    "is_truth",
    "kind_of",
    "linear",
    "loads",
    "lower_bound",
    "mentions",
    "mul",
    "nonzero",
    "ordered",
    "parts",
    "rebuilt",
    "shortened",
    "sizes",
    "substitute",
    "test",
    "text",
    "where",
]
