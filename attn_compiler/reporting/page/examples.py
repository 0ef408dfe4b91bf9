"""Made-up values of tensors and symbolic sizes, to draw a mask that reads them at run time. A drawing says so.

The expression of a tensor's element is replaced by one of positions alone: padding is in the first keys, there are four documents, and so
on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.index_expr.changing import throughout
from attn_compiler.spec import masks
from attn_compiler.spec.attention import Dim
from attn_compiler.spec.masks import SEQLEN_KV, SEQLEN_Q, MaskKind, MaskSpec

_Q, _K = Index("q"), Index("k")

#: assumed length of a sequence with a symbolic length
_LENGTH = 1024
#: beginnings of documents, in hundredths of the keys
_DOCUMENTS = (30, 55, 80)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawable:
    """A mask that can be evaluated to numbers.

    condition: over (b, h, q, k) and the given sizes, without tensors.
    sizes: of symbols.
    made_up: the made-up values, in words.
    """

    condition: Expr
    seqlen_q: int
    seqlen_kv: int
    sizes: Mapping[str, int]
    made_up: tuple[str, ...] = ()


class NotDrawn(Exception):
    """A mask has no drawing, with the reason. Internal: the page says it."""


#: the replacement of a tensor's element, and its words; None if no plausible value is known
_Found = tuple[Expr, str] | None
_Example = Callable[[Load], _Found]


def drawable(mask: MaskSpec, query_dim: Dim, key_dim: Dim, *, is_added: bool = False) -> Drawable:
    """Return the mask with made-up values. Raises NotDrawn if it was not read, or there are no plausible values. query_dim, key_dim: the
    numbers of queries and keys. is_added: the mask tensor was read, and adds something to scores."""
    if mask.reason is not None:
        raise NotDrawn(
            f"the mask was not proved, so which pairs it leaves out is known at run time only: {mask.reason}"
        )
    if mask.dense is not None and not mask.held and not is_added:
        raise NotDrawn("what the mask tensor holds is known at run time only")
    seqlen_q, seqlen_kv = _length(query_dim), _length(key_dim)
    sizes = {dim: _LENGTH for dim in (query_dim, key_dim) if isinstance(dim, str)}
    made_up = [f"the size {name} is {size}" for name, size in sizes.items()]
    conditions = []
    for kind in mask.kinds:
        condition, words = _without_tensors(kind, seqlen_q, seqlen_kv)
        conditions.append(condition)
        made_up += words
    whole = ix.apply("and", *conditions) if conditions else ix.TRUE
    sizes |= {str(SEQLEN_Q.name): seqlen_q, str(SEQLEN_KV.name): seqlen_kv}
    unknown = ix.sizes(whole) - sizes.keys()
    if len(unknown) == 1:
        # One number is the filled length of a cache. The relation of several is unknown.
        (name,) = unknown
        sizes[name] = 3 * seqlen_kv // 4
        made_up.append(f"the size {name} is {sizes[name]}")
    elif unknown:
        raise NotDrawn(f"it depends on sizes that are known at run time only: {', '.join(sorted(unknown))}")
    made_up += [
        words
        for index, words in (("b", "the first batch row"), ("h", "the first head"))
        if index in whole.facts.indices
    ]
    return Drawable(
        condition=whole, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, sizes=sizes, made_up=tuple(dict.fromkeys(made_up))
    )


def _length(dim: Dim) -> int:
    return dim if isinstance(dim, int) else _LENGTH


def _without_tensors(kind: MaskKind, seqlen_q: int, seqlen_kv: int) -> tuple[Expr, list[str]]:
    """Return a kind's condition without tensors, and the words of its made-up values."""
    if isinstance(kind, masks.AnyOf):
        parts = [[_without_tensors(each, seqlen_q, seqlen_kv) for each in kinds] for kinds in kind.alternatives]
        alternatives = [ix.apply("and", *(condition for condition, _ in part)) for part in parts]
        return ix.apply("or", *alternatives), [words for part in parts for _, told in part for words in told]
    condition = kind.condition
    if not condition.facts.has_loads:
        return condition, []
    if isinstance(kind, masks.KeyPadding):
        return _padded(condition, seqlen_kv)
    return _replaced(condition, _example(kind, condition, seqlen_q, seqlen_kv))


def _padded(condition: Expr, seqlen_kv: int) -> tuple[Expr, list[str]]:
    """Replace elements so that the first keys are padding, for either polarity."""
    first = 3 * seqlen_kv // 10

    def example(real: Expr) -> _Example:
        return lambda load: (real, f"{load.tensor} leaves out the first {first} keys")

    for real in (ix.compare(">=", _K, Const(first)), ix.compare("<", _K, Const(first))):
        found, words = _replaced(condition, example(real))
        if ix.substitute(found, _K, Const(seqlen_kv - 1)) == ix.TRUE:
            return found, words
    raise NotDrawn(f"no example is known of {ix.text(condition, 80)}")


def _replaced(condition: Expr, example: _Example) -> tuple[Expr, list[str]]:
    told: list[str] = []

    def change(x: Expr) -> Expr:
        if not isinstance(x, Load):
            return x
        found = example(x)
        if found is None:
            raise NotDrawn(f"what {x.tensor} holds is known at run time only")
        value, words = found
        told.append(words)
        return {"bool": ix.as_bool, "int": ix.as_int, "float": ix.as_float}[x.kind](value)

    return throughout(condition, change), told


def _example(kind: MaskKind, condition: Expr, seqlen_q: int, seqlen_kv: int) -> _Example:
    """Return made-up values of the tensors that a kind reads."""
    filled = seqlen_kv - seqlen_q if seqlen_q > 1 else min(3 * seqlen_kv // 5, seqlen_kv - 1)

    def number(value: int, what: str) -> _Example:
        return lambda load: None if _positions(load) else (Const(value), f"{what} that {load.tensor} gives is {value}")

    def document(load: Load) -> _Found:
        if len(_positions(load)) != 1:
            return None
        starts = [seqlen_kv * share // 100 for share in _DOCUMENTS]
        value: Expr = ix.ZERO
        for start in starts:
            value = ix.add(value, ix.as_int(ix.compare(">=", Index(*_positions(load)), Const(start))))
        return value, f"{load.tensor} tells four documents, which begin at 0, {', '.join(map(str, starts))}"

    def any_other(load: Load) -> _Found:
        if _positions(load) == {"q"} and load.kind == "int":
            return ix.add(_Q, Const(max(filled, 0))), f"{load.tensor} counts positions from {max(filled, 0)}"
        return number(max(filled, 0), "the number")(load)

    match kind:
        case masks.Document():
            return document
        case masks.KeyBound(side="last"):
            return number(3 * seqlen_kv // 4, "the length")
        case masks.KeyBound():
            return number(seqlen_kv // 5, "the first key")
        case masks.Prefix():
            return number(3 * seqlen_kv // 10, "the length of the prefix")
        case masks.Chunked():
            return number(0, "the first position")
        case masks.CausalFrom():
            return number(max(filled, 0), "the number of keys before")
    read: dict[str, set[str]] = {}
    for load in ix.loads(condition):
        read.setdefault(load.tensor, set()).update(_positions(load))
    # A tensor read at the query and at the key groups positions.
    together = any(positions == {"q", "k"} for positions in read.values())
    return lambda load: document(load) if together and read[load.tensor] == {"q", "k"} else any_other(load)


def _positions(load: Load) -> set[str]:
    """Return "q", "k" or both: the positions that an element depends on."""
    return {name for at in load.at for name in at.facts.indices} & {"q", "k"}
