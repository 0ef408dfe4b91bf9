"""Private PyTorch API of symbolic sizes: what is known of them, what they are in this call, and guards that fix them."""

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

#: what older releases of PyTorch have for no end lies above
_NO_END = 2**48


def statically_known(condition: bool | torch.SymBool) -> bool:
    """Whether `condition` always holds. Adds no guard: a symbolic condition that can't be proved is False."""
    return bool(symbolic_shapes.statically_known_true(condition))


def example(number: Any) -> Any:
    """A number that may be symbolic as this call has it; None where that is not known while compiling. Adds no guard."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    return number.node.hint if number.node.has_hint() else None


def example_of(number: Any, size_of: Callable[[int], int]) -> Any:
    """A number that may be symbolic, as a call would have it whose sizes are others. size_of: from a size of this call. None where it is
    not known while compiling. Adds no guard."""
    if not isinstance(number, torch.SymInt):
        return example(number)
    sizes = number.node.shape_env.backed_var_to_val
    symbols = number.node.expr.free_symbols
    if not symbols <= sizes.keys():
        return None
    found = number.node.expr.xreplace({symbol: sympy.Integer(size_of(int(sizes[symbol]))) for symbol in symbols})
    return int(found) if found.is_Integer else None


def dim_of(size: int | torch.SymInt) -> int | str:
    """A size as a spec has it: the int if it is one always, else its symbolic expression ("s0"). Adds no guard."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = expr_of(size)
    return int(expr) if expr.is_Integer else str(expr)


def expr_of(size: torch.SymInt) -> sympy.Expr:
    """A size as an expression in a form that equal ones share, as far as that is known without a new guard."""
    expr = size.node.expr
    return expr if expr.is_Atom else _equal(size.node.shape_env, normal(expr))


def _equal(env: symbolic_shapes.ShapeEnv, size: sympy.Expr) -> sympy.Expr:
    """The size in the form of those that guards of by now say it is equal to: s0//4 for s1//4. Of symbols, PyTorch keeps that itself."""
    count, known = _EQUAL.get(env, (0, {}))
    if count != len(env.guards):
        count, known = (count, dict(known)) if count < len(env.guards) else (0, {})
        for guard in env.guards[count:]:
            if isinstance(guard.expr, sympy.Eq):
                known |= _solved(_replaced(normal(env.replace(guard.expr.lhs - guard.expr.rhs)), known))
        _EQUAL[env] = len(env.guards), known
    return _replaced(size, known)


#: how many guards were looked at, and what they say that products and quotients are
_EQUAL: weakref.WeakKeyDictionary[symbolic_shapes.ShapeEnv, tuple[int, dict[sympy.Expr, sympy.Expr]]] = (
    weakref.WeakKeyDictionary()
)


def _solved(zero: sympy.Expr) -> dict[sympy.Expr, sympy.Expr]:
    """What a product or a quotient in a sum that is zero is. Of several, the last by its name."""
    terms = zero.as_coefficients_dict()
    may_go = sorted((part for part, factor in terms.items() if abs(factor) == 1 and not part.is_Atom), key=str)
    return {may_go[-1]: may_go[-1] - zero / terms[may_go[-1]]} if may_go else {}


def _replaced(size: sympy.Expr, known: Mapping[sympy.Expr, sympy.Expr]) -> sympy.Expr:
    for part, other in known.items():
        size = size.xreplace({part: other})
    return size


@functools.lru_cache(4096)
def normal(expr: sympy.Expr) -> sympy.Expr:
    """A size that is more than a symbol, its products and quotients carried out: s*s // s is s, (s - 1)//2 + 1 is (s + 1)//2."""
    if expr.is_Atom or expr.has(sympy.Float, getattr(sympy_functions, "ToFloat", sympy.Float)):
        return expr  # floats round: in another order they are other numbers
    quotients = {part: _quotient(*map(normal, part.args)) for part in expr.atoms(sympy_functions.FloorDiv)}
    return sympy.expand(expr.xreplace(quotients))


def _quotient(whole: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    """whole // by, with what divides taken out."""
    out, rest = sympy.Integer(0), sympy.Integer(0)
    for part in sympy.Add.make_args(sympy.expand(whole)):
        if part.is_Integer and by.is_Integer and by != 0:
            out, rest = out + part // by, rest + part % by
        elif (part / by).as_numer_denom()[1] == 1:
            out += part / by
        else:
            rest += part
    return out if rest == 0 else out + sympy_functions.FloorDiv(rest, by)


def of_inputs(size: torch.SymInt) -> tuple[sympy.Expr, int] | None:
    """The expression of a size, and how often PyTorch has learned of symbols so far, which is what its own caches go by. None where a
    symbol is made by an op while the graph runs."""
    if not isinstance(size.node, sym_node.SymNode):
        return None
    env, expr = env_of(size), size.node.expr
    return (expr, env._version_counter) if expr.free_symbols <= env.backed_var_to_val.keys() else None


#: stands for a number whose name does not matter
_ANY = sympy.Symbol("any")


def of_float(number: torch.SymFloat) -> tuple[str, ...] | None:
    """What a float that Dynamo made symbolic is in this call, its range, and what guards of by now ask of it, whatever its name is. None
    where it is computed from others."""
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
    """The least and the most that a size can be by the guards of by now; None: no end. Adds no guard."""
    if not isinstance(size, torch.SymInt):
        return int(size), int(size)
    found = size.node.shape_env.bound_sympy(expr_of(size))
    least, most = (int(end) if end.is_Integer else None for end in (found.lower, found.upper))
    is_empty = not least and not statically_known(size >= 1)
    return least or int(not is_empty), None if most is None or most >= _NO_END else most


def ask_for_some(size: int | torch.SymInt) -> None:
    """A guard that a size is not zero, where it is not in this call, and may be in others. Where no guard can be added, it still may be."""
    if isinstance(size, torch.SymInt) and size.node.has_hint() and not size.node.shape_env.frozen:
        bool(size >= 1)


def decided(size: int | torch.SymInt) -> sympy.Expr:
    """A size as an expression; where it is the larger or smaller of two, and guards of by now say which: that one. Adds no guard."""
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
    """What a float that Dynamo made symbolic is in this call, which a guard asks of every later one: another number compiles anew. None,
    and no guard, where it is computed from sizes, too, or is not known while compiling."""
    is_of_floats = all(symbol_is_type(symbol, SymT.FLOAT) for symbol in number.node.expr.free_symbols)
    return float(symbolic_shapes.guard_scalar(number)) if is_of_floats and number.node.has_hint() else None


def constant(number: object) -> float | None:
    """A float that is one number always, though Dynamo computes it as a symbolic one (of sizes that guards fix). Adds no guard."""
    if not isinstance(number, torch.SymFloat):
        return float(number) if isinstance(number, (int, float)) else None
    expr = number.node.shape_env.replace(number.node.expr)
    return float(expr) if expr.is_number else None


def largest(value: torch.Tensor, size: sympy.Expr, most: int) -> int | None:
    """The largest that a size can be. Of symbols without a known end, guards ask from here on that they are at most `most`, if they are
    in this call. None where it is not known. value: a fake tensor of the same graph."""
    env = _shape_env(value)
    if env is None or size.is_Integer:
        return int(size) if size.is_Integer else most
    known = {str(symbol): symbol for symbol in env.var_to_range}
    size = size.xreplace({symbol: known[str(symbol)] for symbol in size.free_symbols if str(symbol) in known})
    for symbol in size.free_symbols:
        _hold(env, symbol, lambda number: number <= most, unless=env.bound_sympy(symbol).upper.is_Integer)
    upper = env.bound_sympy(size).upper
    return int(upper) if upper.is_Integer else None


def is_of_positive(number: torch.SymInt) -> bool:
    """Whether all symbols in a number are at least 1, as sizes are: known, or asked by guards from here on if they are in this call."""
    env = number.node.shape_env
    for symbol in number.node.expr.free_symbols:
        _hold(env, symbol, lambda symbolic: symbolic >= 1, unless=bool(env.bound_sympy(symbol).lower >= 1))
    return all(env.bound_sympy(symbol).lower >= 1 for symbol in number.node.expr.free_symbols)


def _shape_env(value: torch.Tensor) -> symbolic_shapes.ShapeEnv | None:
    mode = getattr(value, "fake_mode", None)
    return None if mode is None else mode.shape_env


def _hold(
    env: symbolic_shapes.ShapeEnv,
    symbol: sympy.Symbol,
    condition: Callable[[torch.SymInt], torch.SymBool | bool],
    *,
    unless: bool,
) -> None:
    """A guard that the condition is what it is in this call, where that is known while compiling."""
    number = env.create_symintnode(symbol, hint=None)
    if not unless and isinstance(number, torch.SymInt) and number.node.has_hint():
        bool(condition(number))


def simplified(mode: FakeTensorMode, size: sympy.Expr) -> sympy.Expr:
    """A size as the guards of by now have it: a symbol that some op fixed in the meantime is a number."""
    return size if mode.shape_env is None else _equal(mode.shape_env, normal(mode.shape_env.replace(size)))


# ---- what is known, to be told to another process -----------------------------------------------------------------------

_SYMPY = ("Add", "Mul", "Pow", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not")
_PYTORCH = (
    *("CeilToInt", "CleanDiv", "FloorDiv", "Max", "Min", "Mod", "ModularIndexing", "PythonMod", "PowByNatural"),
    *("FloatPow", "FloatTrueDiv", "FloorToInt", "IntTrueDiv", "ToFloat", "TruncToInt", "OpaqueUnaryFn_sqrt"),
)
#: what sizes, other symbolic numbers and guards are made of, beside symbols and numbers, by the names of their classes
FUNCTIONS: dict[str, Callable[..., sympy.Basic]] = {
    kind.__name__: kind
    for kind in (
        *(getattr(sympy, name) for name in _SYMPY),
        *(getattr(sympy_functions, name) for name in _PYTORCH if hasattr(sympy_functions, name)),
    )
}


def env_of(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> symbolic_shapes.ShapeEnv:
    """What knows of a number's symbols."""
    env: symbolic_shapes.ShapeEnv = number.node.shape_env
    return env


def symbols(env: symbolic_shapes.ShapeEnv) -> dict[str, sympy.Symbol]:
    """By their names."""
    return {str(symbol): symbol for symbol in env.var_to_range}


def knowledge(env: symbolic_shapes.ShapeEnv) -> list[Any] | None:
    """All that questions about symbols are answered by, but for guards, and for what the symbols are in this call. None where there is more
    than this tells."""
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
        # What a symbol was replaced by may be a symbol that was replaced in turn, until somebody asks.
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
    """What every call has to hold, in the order in which it was asked."""
    return [guard.expr for guard in env.guards]


def holds(env: symbolic_shapes.ShapeEnv, condition: sympy.Basic) -> bool:
    """Whether a condition holds in this call. Adds no guard."""
    return bool(condition.xreplace(env.backed_var_to_val) == sympy.true)


def ask(env: symbolic_shapes.ShapeEnv, condition: sympy.Basic) -> None:
    """A guard that asks every call for a condition, which holds in this one."""
    bool(env.create_symboolnode(condition))


def unasked(env: symbolic_shapes.ShapeEnv) -> contextlib.AbstractContextManager[None]:
    """Within the block, questions are answered by this call's sizes, and no guard is added."""
    return env.suppress_guards()


def sized(env: symbolic_shapes.ShapeEnv, size: sympy.Expr) -> int | torch.SymInt:
    """A size of an expression."""
    found: int | torch.SymInt = env.create_symintnode(size, hint=None)
    return found
