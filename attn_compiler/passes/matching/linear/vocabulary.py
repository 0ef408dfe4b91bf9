"""Words allowed in the text of a function, and the outside names that it reads: statements, tensor methods, functions of PyTorch.

Everything not listed is refused. A tensor has hundreds of attributes for its memory, mode or device, and any of them could change the
result. operations.py checks which ops run.
"""

from __future__ import annotations

import ast
import builtins
import math
import types
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from attn_compiler.passes.matching.linear import operations

Chain = tuple[str, ...]

_STATEMENTS = (
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.If, ast.For, ast.While, ast.Break, ast.Continue),
    *(ast.Expr, ast.Pass, ast.Assert, ast.Raise),
)
_EXPRESSIONS = (
    *(
        ast.Constant,
        ast.Name,
        ast.Attribute,
        ast.Subscript,
        ast.Slice,
        ast.Tuple,
        ast.List,
        ast.Starred,
        ast.Call,
        ast.keyword,
    ),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.ListComp, ast.GeneratorExp, ast.comprehension),
    *(ast.JoinedStr, ast.FormattedValue, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)
#: attributes of tensors: their sizes, and properties that other tensors are made with
_ATTRIBUTES = frozenset("shape ndim dtype device mT T".split())
_METHODS = operations.ALLOWED | frozenset(
    "size dim numel to float double half bfloat16 type_as view_as expand_as reshape_as flatten unflatten movedim swapaxes narrow chunk "
    "matmul softplus append extend".split()
)
_FUNCTIONS = operations.ALLOWED | frozenset(
    "flatten movedim swapaxes narrow chunk pad softplus silu solve_triangular".split()
)
_OF_PYTORCH = (torch, F, torch.linalg)
_BUILTINS = frozenset(
    "range len float int tuple list zip enumerate reversed slice sum ValueError TypeError RuntimeError NotImplementedError".split()
)


def chains(tree: ast.FunctionDef, outside: frozenset[str]) -> Iterator[Chain | str]:
    """Yield each outside name that a function reads, as a name with its attributes, and each unlisted word, as a text.

    outside: the names that its code looks up elsewhere.
    """
    for statement in tree.body:
        yield from _visited(statement, outside)


def _visited(node: ast.AST, outside: frozenset[str]) -> Iterator[Chain | str]:
    if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS)):
        yield f"line {_line(node)} has `{type(node).__name__.lower()}`"
        return
    chain = _chain(node)
    if chain is not None and chain[0] in outside:
        yield chain
        return
    called = node.func if isinstance(node, ast.Call) else None
    if called is not None and (chain := _chain(called)) is not None and chain[0] in outside:
        yield chain
    elif isinstance(called, ast.Attribute) and {called.attr, called.attr.removesuffix("_")} & _METHODS:
        yield from _visited(called.value, outside)
    elif called is not None:
        yield f"line {_line(node)} calls `{ast.unparse(called)}`"
    elif isinstance(node, ast.Attribute) and node.attr not in _ATTRIBUTES:
        yield f"line {_line(node)} reads `{ast.unparse(node)}`"
    unread = {"annotation"} if called is None else {"func"}
    for name, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else (value,):
            if name not in unread and isinstance(part, ast.AST):
                yield from _visited(part, outside)


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _chain(node: ast.AST) -> Chain | None:
    """Split a name with its attributes: ("torch", "linalg", "solve_triangular")."""
    if isinstance(node, ast.Name):
        return (node.id,)
    before = _chain(node.value) if isinstance(node, ast.Attribute) else None
    return None if before is None else (*before, node.attr)  # type: ignore[attr-defined]


def is_known(value: object, name: str) -> bool:
    """Return whether a function is independent of process state: a builtin, one of `math`, or a listed one of PyTorch."""
    if name in _BUILTINS and vars(builtins).get(name) is value:
        return True
    if not isinstance(value, (types.BuiltinFunctionType, types.FunctionType)):
        return False
    if getattr(value, "__module__", None) == math.__name__:
        return True
    is_pythons = isinstance(value, types.FunctionType) and value.__globals__.get("__name__") == value.__module__
    is_of_pytorch = is_pythons and value.__module__.partition(".")[0] == torch.__name__
    return (
        (is_of_pytorch or isinstance(value, types.BuiltinFunctionType))
        and name in _FUNCTIONS
        and any(vars(one).get(name) is value for one in _OF_PYTORCH)
    )


def is_constant(value: object) -> bool:
    """Return whether a value never changes and its repr tells all of it."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(is_constant, value))
    return value is None or type(value) in (int, float, bool, str, torch.dtype, torch.memory_format)
