"""Check that no branch of a function depends on the values of its operands: a branch may read flags, ranks and None only.

A test runs one side of a branch. A branch on numbers, on the batch or on the device could take the other side in the model. Allowed
conditions:

- a parameter, a call of `is_torchdynamo_exporting`, `x is None`, and these under `not`, `and`, `or`
- the rank of a tensor: `len(x.shape) == 4`, `x.dim() == 3`
- a comparison of two numbers of heads for equality, each taken from a shape by one assignment
- a test for padding: `pad > 0` for a remainder
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

#: functions that return True only during export, where no call is taken
FALSE_HERE = frozenset({"is_torchdynamo_exporting"})
_TESTED = (ast.If, ast.IfExp, ast.While, ast.Assert)
#: the axis of heads in (batch, tokens, heads, dim)
_HEADS = (2, -2)
_RANK = 4


def why_not(tree: ast.FunctionDef) -> str | None:
    """Return the first condition or comparison in a function's text that is not allowed; None if all are."""
    names = _Names(tree)
    allowed = {id(part) for test in _tests(tree) for part in _parts(test) if names.may_test(part)}
    for test in _tests(tree):
        for part in _parts(test):
            if id(part) not in allowed:
                return f"it branches on `{ast.unparse(part)}`"
    # A truth value may also select without a branch: `[a, b][n > 3]`, `2 * (n > 3)`.
    loose = (node for node in ast.walk(tree) if isinstance(node, (ast.Compare, ast.BoolOp)) and id(node) not in allowed)
    inside = {id(part) for test in _tests(tree) for part in ast.walk(test)}
    found = next((node for node in loose if id(node) not in inside), None)
    return None if found is None else f"it compares `{ast.unparse(found)}`"


def _tests(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, _TESTED):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def _parts(test: ast.expr) -> Iterator[ast.expr]:
    """Yield the operands of a condition under `not`, `and` and `or`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _parts(value)
    else:
        yield test


class _Names:
    """Facts about the names of a function. heads: names of numbers of heads. remainders: names of remainders of a division."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        arguments = tree.args
        self.parameters = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        heads: set[str] = set()
        values: dict[int, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                heads |= _heads_in(node.targets[0], node.value)
                values[id(node.targets[0])] = node.value
        given: dict[str, list[ast.expr | None]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                given.setdefault(node.id, []).append(values.get(id(node)))
        self.heads = {name for name in heads if len(given.get(name, ())) == 1}
        self.written = given.keys()
        alone = {name: values[0] for name, values in given.items() if len(values) == 1}
        self.remainders = {
            name for name, value in alone.items() if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mod)
        }

    def may_test(self, test: ast.expr) -> bool:
        match test:
            case ast.Name(id=name):
                return name in self.parameters and name not in self.written
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
                return name in FALSE_HERE
            case ast.Compare(left=ast.Name(), ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                return True
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=int())]):
                return _is_rank(left)
            case ast.Compare(left=ast.Name(id=a), ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Name(id=b)]):
                return a in self.heads and b in self.heads
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Gt()], comparators=[ast.Constant(value=0)]):
                return name in self.remainders
        return False


def _heads_in(target: ast.expr, value: ast.expr) -> set[str]:
    """Name of the number of heads in `batch, tokens, heads, dim = x.shape` or `heads, dim = x.shape[-2:]`."""
    if not isinstance(target, ast.Tuple):
        return set()
    match value:
        case ast.Attribute(attr="shape") if len(target.elts) == _RANK:
            place = _HEADS[0]
        case ast.Subscript(
            value=ast.Attribute(attr="shape"),
            slice=ast.Slice(lower=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=2)), upper=None, step=None),
        ) if len(target.elts) == -_HEADS[1]:
            place = 0
        case _:
            return set()
    name = target.elts[place]
    return {name.id} if isinstance(name, ast.Name) else set()


def _is_rank(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=ast.Name(id="len"), args=[ast.Attribute(attr="shape")]):
            return True
        case ast.Call(func=ast.Attribute(attr="dim"), args=[]) | ast.Attribute(attr="ndim"):
            return True
    return False
