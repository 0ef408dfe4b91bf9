"""Score kinds of the terms that are added to scores: each summand (added.py) is one kind.

A kind is recognised by the structure of its expression, so its float arithmetic need not be bit-exact. Masks, and choices between two
numbers, must be exact: meaning.py leaves a condition on rounded arithmetic (`ix.is_exact`) to the dense tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, get_args

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load
from attn_compiler.index_expr.changing import rename, with_parts
from attn_compiler.passes.recovering.added import Summand, total
from attn_compiler.spec import added_scores
from attn_compiler.spec.added_scores import ProvedScore

B, H, Q, K = map(Index, "bhqk")


def recognise(added: tuple[Summand, ...]) -> tuple[ProvedScore, ...]:
    """Return the kinds whose sum equals the summands. A plain load becomes a Bias with an empty shape."""
    weights: dict[Expr, float] = {}
    for part in added:
        value = _unrounded(part.value)
        weights[value] = weights.get(value, 0.0) + part.weight
    return tuple(_kind(Summand(value=value, weight=weight)) for value, weight in weights.items())


def joined(kinds: Iterable[ProvedScore]) -> tuple[ProvedScore, ...]:
    """Sort kinds in print order, and add up the slopes of equal ALiBi positions (Falcon's eager code adds ALiBi twice)."""
    alibis: dict[Expr, added_scores.Alibi] = {}
    rest = []
    for kind in kinds:
        if not isinstance(kind, added_scores.Alibi):
            rest.append(kind)
            continue
        known = alibis.get(kind.position)
        if known is not None:
            learned = known.requires_grad or kind.requires_grad
            kind = replace(kind, slopes=ix.add(known.slopes, kind.slopes), requires_grad=learned)
        alibis[kind.position] = kind
    return tuple(sorted([*alibis.values(), *rest], key=lambda kind: added_scores.PROVED_KINDS.index(type(kind))))


def chooses_exactly(x: Expr) -> bool:
    """True if no truth value in x rests on rounded arithmetic. A number may be rounded; a choice between two numbers may not."""
    return all(ix.is_exact(part) for part in ix.ordered(x) if ix.kind_of(part) == "bool")


def _unrounded(x: Expr) -> Expr:
    done = with_parts(x, _unrounded)
    return done.args[0] if isinstance(done, Apply) and done.op == "rounded" else done


def _kind(part: Summand) -> ProvedScore:
    for recogniser in RECOGNISERS:
        found = recogniser(part)
        if found is not None:
            return found
    return added_scores.BiasFormula(value=total((part,)))


# ---- ALiBi --------------------------------------------------------------------------------------------------------


def _alibi(part: Summand) -> ProvedScore | None:
    """Recognise slope(h) · position, where the position is an integer."""
    slopes: Expr = Const(float(part.weight))
    position: Expr | None = None
    for factor in _factors(part.value):
        if not ix.mentions(factor, B, Q, K):
            slopes = ix.mul(slopes, factor)
        elif position is None and not ix.mentions(factor, H):
            position = _whole(factor)
        else:
            return None
    if position is None or not ix.mentions(slopes, H) or not _is_position(position):
        return None
    return added_scores.Alibi(slopes=slopes, position=position)


def _factors(x: Expr) -> Iterator[Expr]:
    match x:
        case Apply(op="mul", args=(a, b)) if ix.kind_of(x) == "float":
            yield from _factors(a)
            yield from _factors(b)
        case Apply(op="div", args=(a, b)) if a != Const(1.0):
            yield from _factors(a)
            yield ix.apply("div", Const(1.0), b)
        case _:
            yield x


def _whole(x: Expr) -> Expr | None:
    """Return x if it is an integer, or the integer that it converts to a float; else None."""
    if ix.kind_of(x) == "int":
        return x
    return (
        x.args[0] if isinstance(x, Apply) and x.op in ("float", "rounded") and ix.kind_of(x.args[0]) == "int" else None
    )


def _is_position(x: Expr) -> bool:
    """True if an integer is linear in k, linear in |k - q|, or read at run time for each key."""
    form = ix.linear(x)
    of_key = [(term, factor) for term, factor in form.terms if ix.mentions(term, K)]
    if not of_key:
        return False
    if len(of_key) == 1:
        term, _ = of_key[0]
        if term == K or (isinstance(term, Apply) and term.op == "abs" and _difference(term.args[0]) is not None):
            return True
    return all(_is_read_at_keys(term) for term, _ in of_key)


def _is_read_at_keys(x: Expr) -> bool:
    """True for integers that run-time tensors hold for each key, and for combinations of them."""
    match x:
        case Load(at=at, kind=kind):
            return kind != "float" and all(i == K or not ix.mentions(i, K, Q) for i in at)
        case Linear(terms=terms):
            return all(_is_read_at_keys(term) for term, _ in terms)
        case Apply(op="mul" | "where" | "and" | "or" | "not" | "min" | "max", args=args):
            return all(_is_read_at_keys(a) for a in args)
        case ix.Test(form=form):
            return _is_read_at_keys(form)
        case _:
            return not ix.mentions(x, K, Q)


def _difference(x: Expr) -> Linear | None:
    """Return x or -x as k - q + r, with r the same for all queries, keys and heads; else None."""
    form = ix.linear(x) if ix.kind_of(x) == "int" else Linear(())
    factors = dict(form.terms)
    if factors.get(K) not in (1, -1) or factors.get(Q) != -factors[K]:
        return None
    turned = ix.combine(Linear(()), form, factors[K])
    rest = ix.combine(turned, Linear(((K, 1), (Q, -1))), -1)
    return None if ix.mentions(rest, Q, K, H) else turned


# ---- tables -------------------------------------------------------------------------------------------------------


def _relative(part: Summand) -> ProvedScore | None:
    """Recognise table[f(k - q), ...], whose index depends on positions by their difference alone."""
    load = part.value
    if not isinstance(load, Load):
        return None
    rows = [i for i in load.at if ix.mentions(i, Q, K)]
    distances = {d for row in rows for d in _differences(row)}
    if len(rows) != 1 or len(distances) != 1 or any(ix.mentions(i, B) for i in load.at):
        return None
    row, distance = rows[0], distances.pop()
    # With k + q substituted for k, an index that depends on their difference alone mentions no query.
    if ix.mentions(ix.substitute(row, K, ix.add(K, Q)), Q):
        return None
    plain = ix.add(distance, ix.ZERO)
    return added_scores.RelativeBias(
        table=load.tensor, at=load.at, distance=plain, buckets=_log_buckets(row, plain), weight=part.weight
    )


def _differences(x: Expr) -> Iterator[Linear]:
    """Yield every k - q + r in x, with a positive k and without constants."""
    match x:
        case Linear():
            found = _difference(x)
            if found is not None:
                yield Linear(found.terms)
                return
            for term, _ in x.terms:
                yield from _differences(term)
        case ix.Test(form=form):
            yield from _differences(form)
        case Apply(args=args):
            for a in args:
                yield from _differences(a)


def _log_buckets(row: Expr, distance: Expr) -> added_scores.LogBuckets | None:
    """Return T5's buckets if the row is exactly their formula. Constants come from the row, then the whole formula is compared."""
    for log_range, count in _log_scales(row):
        for both_ways in (True, False):
            half = 2 * count
            if _t5_row(distance, half, log_range, both_ways) == row:
                total_count = 2 * half if both_ways else half
                max_distance = round(count * math.exp(log_range))
                return added_scores.LogBuckets(count=total_count, max_distance=max_distance, both_ways=both_ways)
    return None


def _log_scales(x: Expr) -> Iterator[tuple[float, int]]:
    """Yield (c, n) of every log(_ / n) / c in x."""
    match x:
        case Apply(op="div", args=(Apply(op="log", args=(Apply(op="div", args=(_, Const(value=n))),)), Const(value=c))):
            if float(n).is_integer() and n > 0 and math.isfinite(c):
                yield float(c), int(n)
        case Linear(terms=terms):
            for term, _ in terms:
                yield from _log_scales(term)
        case Apply(args=args):
            for a in args:
                yield from _log_scales(a)


def _t5_row(distance: Expr, count: int, log_range: float, both_ways: bool) -> Expr:
    """Return T5's formula of a row, for `count` buckets in one direction. The first half of them are exact."""
    exact = count // 2
    far = ix.apply("abs", distance) if both_ways else ix.mul(ix.apply("min", distance, ix.ZERO), Const(-1))
    wide = ix.apply("div", ix.as_float(far), Const(float(exact)))
    wide = ix.apply("div", ix.apply("log", wide), Const(log_range))
    wide = ix.apply("int", ix.mul(wide, Const(float(count - exact))))
    bucket = ix.where(
        ix.compare("<", far, Const(exact)), far, ix.apply("min", ix.add(wide, Const(exact)), Const(count - 1))
    )
    if not both_ways:
        return bucket
    return ix.add(ix.mul(ix.as_int(ix.compare(">", distance, ix.ZERO)), Const(count)), bucket)


def _gathered(part: Summand) -> ProvedScore | None:
    """Recognise table[f(q, k), ...], with an index that is not just an axis of the score."""
    load = part.value
    if not isinstance(load, Load) or all(_is_axis(i) for i in load.at):
        return None
    return added_scores.GatheredBias(table=load.tensor, at=load.at, weight=part.weight)


def _is_axis(index: Expr) -> bool:
    """True if an index is a constant, an axis of the score, or a component of one that merges several axes."""
    match index:
        case Const() | Index():
            return True
        case Apply(op="floordiv" | "mod", args=(inner, Const() | ix.Size())):
            return _is_axis(inner)
        case _:
            return False


# ---- the rest -----------------------------------------------------------------------------------------------------


def _penalty(part: Summand) -> ProvedScore | None:
    """Recognise `c ? number : 0` and `c ? 0 : number`."""
    if not isinstance(part.value, Apply) or part.value.op != "where":
        return None
    condition, yes, no = part.value.args
    if not isinstance(yes, Const) or not isinstance(no, Const) or (yes.value != 0) == (no.value != 0):
        return None
    if no.value != 0:
        condition, yes = ix.invert(condition), no
    value, region = float(yes.value * part.weight), _region(condition)
    if region is not None:
        return added_scores.RegionPenalty(value=value, of_key=region)
    return added_scores.Penalty(value=value, condition=condition)


def _region(condition: Expr) -> Expr | None:
    """Return f(b, k) of a condition f(b, q) ≠ f(b, k) between integers, which may be held as floats; else None."""
    equal = ix.invert(condition)
    if isinstance(equal, ix.Test) and equal.relation == "==":
        form: Linear | None = equal.form
    elif isinstance(equal, Apply) and equal.op == "eq":
        form = _whole_sum(Apply("add", (equal.args[0], ix.mul(equal.args[1], Const(-1)))))
    else:
        return None
    if form is None or form.const != 0 or ix.mentions(form, H):
        return None
    of_key, of_query = (Linear(tuple(t for t in form.terms if ix.mentions(t[0], i))) for i in (K, Q))
    if ix.combine(of_key, of_query, 1) != form or not of_key.terms:
        return None
    other = ix.linear(ix.substitute(of_key, K, Q))
    return ix.add(of_key, ix.ZERO) if ix.combine(other, of_query, 1) == Linear(()) else None


def _whole_sum(x: Expr) -> Linear | None:
    """Return a sum of integers that are held as floats, as an integer form; else None."""
    match x:
        case Const(value=value):
            return Linear((), int(value)) if float(value).is_integer() else None
        case Apply(op="float", args=(inner,)) if ix.kind_of(inner) == "int":
            return ix.linear(inner)
        case Apply(op="add", args=(a, b)):
            one, other = _whole_sum(a), _whole_sum(b)
            return None if one is None or other is None else ix.combine(one, other, 1)
        case Apply(op="mul", args=(a, Const(value=factor))) if float(factor).is_integer():
            whole = _whole_sum(a)
            return None if whole is None else ix.combine(Linear(()), whole, int(factor))
        case _:
            return None


def _ready_made(part: Summand) -> ProvedScore | None:
    if not isinstance(part.value, Load):
        return None
    return added_scores.Bias(tensor=part.value.tensor, at=part.value.at, shape=(), weight=part.weight)


#: A new kind: one recogniser here, its class in added_scores.py, its test. The first that knows a summand names it
RECOGNISERS: tuple[Callable[[Summand], ProvedScore | None], ...] = (_alibi, _relative, _gathered, _penalty, _ready_made)


def tensors(kind: ProvedScore) -> set[str]:
    """The names of the tensors that a kind reads."""
    found: set[str] = set()

    def note(name: str) -> str:
        found.add(name)
        return name

    renamed(kind, note)
    return found


def renamed(kind: ProvedScore, name: Callable[[str], str]) -> ProvedScore:
    """The same kind with other names of its tensors."""
    changed = {field.name: _renamed(field.name, getattr(kind, field.name), name) for field in fields(kind)}
    return replace(kind, **changed)


def _renamed(field: str, value: Any, name: Callable[[str], str]) -> Any:
    if field in ("table", "tensor"):
        return name(value)
    if field == "at":
        return tuple(rename(i, name) for i in value)
    return rename(value, name) if isinstance(value, get_args(Expr)) else value


def with_gradient(kind: ProvedScore) -> ProvedScore:
    """Return the kind as one that requires a gradient. Penalties read nothing learned and stay."""
    return (
        kind
        if isinstance(kind, (added_scores.Penalty, added_scores.RegionPenalty))
        else replace(kind, requires_grad=True)
    )
