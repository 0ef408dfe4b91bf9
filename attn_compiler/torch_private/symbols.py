"""Private PyTorch API of symbolic sizes: known facts, values in this call, and guards that fix them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config, sym_node, symbolic_shapes
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.symbol import SymT, symbol_is_type

#: older releases of PyTorch use numbers above this for no end
_NO_END = 2**48


def statically_known(condition: bool | torch.SymBool) -> bool:
    """Return True if `condition` always holds. Adds no guard: a symbolic condition that can't be proved is False."""
    return bool(symbolic_shapes.statically_known_true(condition))


def example(number: Any) -> Any:
    """Return the value of a possibly symbolic number in this call; None if unknown while compiling. Adds no guard."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    return number.node.hint if number.node.has_hint() else None


def example_of(number: Any, size_of: Callable[[int], int]) -> Any:
    """Return the value of a possibly symbolic number in a call with other sizes. Adds no guard. size_of: from a size of this call. None if
    unknown while compiling."""
    if not isinstance(number, torch.SymInt):
        return example(number)
    sizes = number.node.shape_env.backed_var_to_val
    symbols = number.node.expr.free_symbols
    if not symbols <= sizes.keys():
        return None
    found = number.node.expr.xreplace({symbol: sympy.Integer(size_of(int(sizes[symbol]))) for symbol in symbols})
    return int(found) if found.is_Integer else None


def dim_of(size: int | torch.SymInt) -> int | str:
    """Return a size as in a spec: the int if it is constant, else its symbolic expression ("s0"). Adds no guard."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = expr_of(size)
    return int(expr) if expr.is_Integer else str(expr)


def expr_of(size: torch.SymInt) -> sympy.Expr:
    """Return a size as an expression in a form that equal ones share, as far as that is known without a new guard."""
    expr = size.node.expr
    return expr if expr.is_Atom else _by_guards(size.node.shape_env, normal(expr))


def _by_guards(env: symbolic_shapes.ShapeEnv, size: sympy.Expr) -> sympy.Expr:
    """Rewrite a size by equalities that guards hold so far: s0//4 replaces s1//4. PyTorch itself replaces only single symbols."""
    count, known = _EQUAL.get(env, (0, {}))
    if count != len(env.guards):
        count, known = (count, dict(known)) if count < len(env.guards) else (0, {})
        for guard in env.guards[count:]:
            if isinstance(guard.expr, sympy.Eq):
                known |= _solved(_replaced(normal(env.replace(guard.expr.lhs - guard.expr.rhs)), known))
        _EQUAL[env] = len(env.guards), known
    return _replaced(size, known)


#: the number of read guards, and the values of products and quotients by them
_EQUAL: weakref.WeakKeyDictionary[symbolic_shapes.ShapeEnv, tuple[int, dict[sympy.Expr, sympy.Expr]]] = (
    weakref.WeakKeyDictionary()
)


def _solved(zero: sympy.Expr) -> dict[sympy.Expr, sympy.Expr]:
    """Solve a sum that is zero for a product or a quotient in it. Of several, the last by its name."""
    terms = zero.as_coefficients_dict()
    may_go = sorted((part for part, factor in terms.items() if abs(factor) == 1 and not part.is_Atom), key=str)
    return {may_go[-1]: may_go[-1] - zero / terms[may_go[-1]]} if may_go else {}


def _replaced(size: sympy.Expr, known: Mapping[sympy.Expr, sympy.Expr]) -> sympy.Expr:
    for part, other in known.items():
        size = size.xreplace({part: other})
    return size


@functools.lru_cache(4096)
def normal(expr: sympy.Expr) -> sympy.Expr:
    """Expand products and quotients of a size: s*s // s is s, (s - 1)//2 + 1 is (s + 1)//2."""
    if expr.is_Atom or expr.has(sympy.Float, getattr(sympy_functions, "ToFloat", sympy.Float)):
        return expr  # float rounding depends on the order
    quotients = {part: _quotient(*map(normal, part.args)) for part in expr.atoms(sympy_functions.FloorDiv)}
    return sympy.expand(expr.xreplace(quotients))


def _quotient(whole: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    """Return whole // by, with divisible terms moved out."""
    out, rest = sympy.Integer(0), sympy.Integer(0)
    for part in sympy.Add.make_args(sympy.expand(whole)):
        if part.is_Integer and by.is_Integer and by != 0:
            out, rest = out + part // by, rest + part % by
        elif (part / by).as_numer_denom()[1] == 1:
            out += part / by
        else:
            rest += part
    return out if rest == 0 else out + sympy_functions.FloorDiv(rest, by)


def expr_of_inputs(size: torch.SymInt) -> tuple[sympy.Expr, int] | None:
    """Return the expression of a size, and PyTorch's version counter of facts about symbols, the key of its own caches. None if a symbol is
    made by an op while the graph runs."""
    if not isinstance(size.node, sym_node.SymNode):
        return None
    env, expr = env_of(size), size.node.expr
    return (expr, env._version_counter) if expr.free_symbols <= env.backed_var_to_val.keys() else None


#: stands for a number of any name
_ANY = sympy.Symbol("any")


def float_key(number: torch.SymFloat) -> tuple[str, ...] | None:
    """Return the value of a float that Dynamo made symbolic, its range, and the guards on it so far, independent of its name. None if it is
    computed from others."""
    if not isinstance(number.node, sym_node.SymNode):
        return None
    env, expr = env_of(number), number.node.expr
    if expr.is_number:
        return (float(expr).hex(),)
    if expr not in env.backed_var_to_val:
        return None
    asked = (guard.expr for guard in env.guards)
    about_it = (str(expr_of.xreplace({expr: _ANY})) for expr_of in asked if expr in expr_of.free_symbols)
    return float(env.backed_var_to_val[expr]).hex(), str(env.var_to_range.get(expr)), *about_it


def range_of(size: int | torch.SymInt) -> tuple[int, int | None]:
    """Return the least and the most that a size can be by the guards so far; None: no end. Adds no guard."""
    if not isinstance(size, torch.SymInt):
        return int(size), int(size)
    found = size.node.shape_env.bound_sympy(expr_of(size))
    least, most = (int(end) if end.is_Integer else None for end in (found.lower, found.upper))
    if least is None or least < 1:
        least = int(statically_known(size >= 1))
    return least, None if most is None or most >= _NO_END else most


def ask_for_some(size: int | torch.SymInt) -> None:
    """Guard that a size is not zero, if it is not in this call, and may be in others. Without guards, it still may be."""
    if isinstance(size, torch.SymInt) and size.node.has_hint() and not size.node.shape_env.frozen:
        bool(size >= 1)


def decided(size: int | torch.SymInt) -> sympy.Expr:
    """Return a size as an expression, with minima and maxima resolved if guards so far settle them. Adds no guard."""
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(size)
    env = size.node.shape_env

    def surely_above(a: sympy.Expr, b: sympy.Expr) -> bool:
        return bool(env.bound_sympy(a - b).lower >= 0)

    def chosen(largest: bool, *args: sympy.Expr) -> sympy.Expr | None:
        at_end = (a for a in args if all(surely_above(*((a, b) if largest else (b, a))) for b in args))
        return next(at_end, None)

    expr = expr_of(size)
    for choice in expr.atoms(sympy_functions.Max, sympy_functions.Min):
        found = chosen(isinstance(choice, sympy_functions.Max), *choice.args)
        expr = expr if found is None else expr.xreplace({choice: found})
    return expr


def fixed(number: torch.SymFloat) -> float | None:
    """Return the value of a float that Dynamo made symbolic, and guard on it: another number compiles anew. None, and no guard, if it is
    computed from sizes, too, or is unknown while compiling."""
    is_of_floats = all(symbol_is_type(symbol, SymT.FLOAT) for symbol in number.node.expr.free_symbols)
    return float(symbolic_shapes.guard_scalar(number)) if is_of_floats and number.node.has_hint() else None


def constant(number: object) -> float | None:
    """Return a float that is always one number, though Dynamo computes it as a symbol (of sizes that guards fix). Adds no guard."""
    if not isinstance(number, torch.SymFloat):
        return float(number) if isinstance(number, (int, float)) else None
    expr = number.node.shape_env.replace(number.node.expr)
    return float(expr) if expr.is_number else None


def largest(value: torch.Tensor, size: sympy.Expr, most: int) -> int | None:
    """Return the largest possible value of a size; None if unknown. value: a fake tensor of the same graph. Symbols without a known end get
    a guard that they are at most `most`, if they are in this call."""
    mode = getattr(value, "fake_mode", None)
    env = None if mode is None else mode.shape_env
    if env is None or size.is_Integer:
        return int(size) if size.is_Integer else most
    known = {str(symbol): symbol for symbol in env.var_to_range}
    size = size.xreplace({symbol: known[str(symbol)] for symbol in size.free_symbols if str(symbol) in known})
    for symbol in size.free_symbols:
        _hold(env, symbol, lambda number: number <= most, unless=env.bound_sympy(symbol).upper.is_Integer)
    upper = env.bound_sympy(size).upper
    return int(upper) if upper.is_Integer else None


def is_of_positive(number: torch.SymInt) -> bool:
    """Return True if all symbols in a number are at least 1, as sizes are: known, or guarded from here on if true in this call."""
    env = number.node.shape_env
    for symbol in number.node.expr.free_symbols:
        _hold(env, symbol, lambda symbolic: symbolic >= 1, unless=bool(env.bound_sympy(symbol).lower >= 1))
    return all(env.bound_sympy(symbol).lower >= 1 for symbol in number.node.expr.free_symbols)


def _hold(
    env: symbolic_shapes.ShapeEnv,
    symbol: sympy.Symbol,
    condition: Callable[[torch.SymInt], torch.SymBool | bool],
    *,
    unless: bool,
) -> None:
    """Guard that the condition keeps its value in this call, if that is known while compiling."""
    number = env.create_symintnode(symbol, hint=None)
    if not unless and isinstance(number, torch.SymInt) and number.node.has_hint():
        bool(condition(number))


def simplified(mode: FakeTensorMode, size: sympy.Expr) -> sympy.Expr:
    """Return a size by the guards so far: a symbol that some op fixed in the meantime is a number."""
    return size if mode.shape_env is None else _by_guards(mode.shape_env, normal(mode.shape_env.replace(size)))


# ---- facts about symbols as data for another process --------------------------------------------------------------------

_SYMPY = ("Add", "Mul", "Pow", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not")
_PYTORCH = (
    *("CeilToInt", "CleanDiv", "FloorDiv", "Max", "Min", "Mod", "ModularIndexing", "PythonMod", "PowByNatural"),
    *("FloatPow", "FloatTrueDiv", "FloorToInt", "IntTrueDiv", "ToFloat", "TruncToInt", "OpaqueUnaryFn_sqrt"),
)
#: functions in sizes, other symbolic numbers and guards, by the names of their classes
FUNCTIONS: dict[str, Callable[..., sympy.Basic]] = {
    kind.__name__: kind
    for kind in (
        *(getattr(sympy, name) for name in _SYMPY),
        *(getattr(sympy_functions, name) for name in _PYTORCH if hasattr(sympy_functions, name)),
    )
}


def env_of(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> symbolic_shapes.ShapeEnv:
    """Return the environment of a number's symbols."""
    env: symbolic_shapes.ShapeEnv = number.node.shape_env
    return env


def symbols(env: symbolic_shapes.ShapeEnv) -> dict[str, sympy.Symbol]:
    """Return symbols by their names."""
    return {str(symbol): symbol for symbol in env.var_to_range}


def knowledge(env: symbolic_shapes.ShapeEnv) -> list[Any] | None:
    """Return all facts that answer questions about symbols, but for guards, and for their values in this call. None if there are further
    facts that it can't represent."""
    untold = (
        env.deferred_runtime_asserts,
        env.unbacked_renamings,
        env.specializations,
        getattr(env, "var_to_hint_override", None),
        env.var_to_range.keys() - env.backed_var_to_val.keys(),
    )
    if any(untold):
        return None
    settings = fx_config.get_config_copy()  # type: ignore[attr-defined]
    return [
        # Replacements may be chained until they are looked up.
        sorted((str(symbol), str(env.replace(symbol)), *_range(env, symbol)) for symbol in env.var_to_range),
        sorted(map(str, env.divisible)),
        sorted(map(str, env.size_like)),
        str(env.settings),
        sorted((name, str(held)) for name, held in settings.items()),
    ]


def _range(env: symbolic_shapes.ShapeEnv, symbol: sympy.Symbol) -> tuple[str, str]:
    found = env.bound_sympy(env.replace(symbol))
    return str(found.lower), str(found.upper)


def guards(env: symbolic_shapes.ShapeEnv) -> list[sympy.Basic]:
    """Return the conditions of every call, in the order in which they were added."""
    return [guard.expr for guard in env.guards]


def holds(env: symbolic_shapes.ShapeEnv, condition: sympy.Basic) -> bool:
    """Return True if a condition holds in this call. Adds no guard."""
    return bool(condition.xreplace(env.backed_var_to_val) == sympy.true)


def ask(env: symbolic_shapes.ShapeEnv, condition: sympy.Basic) -> None:
    """Add a guard for a condition, which holds in this call."""
    bool(env.create_symboolnode(condition))


def unasked(env: symbolic_shapes.ShapeEnv) -> contextlib.AbstractContextManager[None]:
    """Answer questions within the block by this call's sizes, without adding guards."""
    return env.suppress_guards()


def sized(env: symbolic_shapes.ShapeEnv, size: sympy.Expr) -> int | torch.SymInt:
    """Make a size of an expression."""
    found: int | torch.SymInt = env.create_symintnode(size, hint=None)
    return found
