"""A program of its own for one site, as a bug report wants it: spec, strides, options, random inputs, times beside Inductor and eager."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from string import Template

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, Size, Test
from attn_compiler.spec import masks
from attn_compiler.spec.added_scores import Bias
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Flag

_TEMPLATE = Path(__file__).with_name("site.py.txt")
#: positions by the names that expressions give them, in the order of the axes
_PLACES = {"b": "row", "h": "head", "q": "query", "k": "key"}
#: names of the program itself
_OWN = frozenset({*"qkv", "allowed", "sinks", "scores", "weights", "torch", "F", "Sq", "Skv", *_PLACES.values()})
_OPS = {
    "not": "({} == False)",
    "xor": "({} != {})",
    "eq": "({} == {})",
    "lt": "({} < {})",
    "mul": "({} * {})",
    "add": "({} + {})",
    "floordiv": "({} // {})",
    "mod": "({} % {})",
}
#: functions in the text of a size, as code
_IN_SIZES = {
    "Max": "max",
    "Min": "min",
    **dict.fromkeys(("FloorDiv", "CleanDiv"), "operator.floordiv"),
    **dict.fromkeys(("Mod", "PythonMod"), "operator.mod"),
    "ModularIndexing": "lambda x, by, below: x // by % below",
    **dict.fromkeys(("PowByNatural", "FloatPow"), "operator.pow"),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), "operator.truediv"),
    **dict.fromkeys(("FloorToInt", "TruncToInt"), "int"),
    "CeilToInt": "math.ceil",
    "ToFloat": "float",
    "OpaqueUnaryFn_sqrt": "math.sqrt",
}


class _NotWritten(Exception):
    """An expression that has no line of code. Internal: a random tensor is in its place."""


def script(spec: AttentionSpec, title: str, options: str) -> str:
    """Return the text of a program that computes the site alone. options: as JSON."""
    inputs = {
        name: f"tensor({_row(x.shape)}, {_row(x.strides)}, torch.{x.dtype}, {x.requires_grad})"
        for name, x in (("q", spec.q), ("k", spec.k), ("v", spec.v))
    }
    body = _body(spec, inputs)
    sizes = _sizes(spec, body, inputs)
    lost = list(_lost(spec, sizes, options))
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=" ".join(title.replace("\\", "/").replace('"""', "").split()),
        left_out=f"\nNot as in the model: {', '.join(lost)}." if lost else "",
        spec=repr(spec.to_text()),
        options=_literal(options, spec),
        device=spec.device,
        sizes="".join(f"{name} = {value}\n" for name, value in sizes.items()),
        inputs="\n".join(f'    "{name}": {value},' for name, value in inputs.items()),
        names=", ".join(inputs),
        body="\n".join(f"    {line}" for line in body),
    )


def _literal(options: str, spec: AttentionSpec) -> str:
    """Return the options as code. A recipe without its patterns is in the spec, and ranks that share a sequence can't be written."""
    given = {name: repr(value) for name, value in json.loads(options).items() if not isinstance(value, dict)}
    given |= {} if spec.fp8 is None else {"fp8_recipe": "SPEC.fp8"}
    return f"{{{', '.join(f'{name!r}: {value}' for name, value in given.items())}}}"


def _lost(spec: AttentionSpec, sizes: Mapping[str, object], options: str) -> Iterator[str]:
    facts = {
        "a symbolic size is a number": bool(sizes),
        "no rank shares the sequence": "context_parallel" in json.loads(options),
        "no cache in FP8": spec.stored is not None,
        "k and v are no maps of a latent": spec.latent is not None,
        "nothing reads the weights or the logsumexp": spec.returns_weights or spec.lse != "unread",
        "what is added is random": bool(spec.score.proved),
        "no factor of run time": spec.score.runtime_scale,
        "the mask is random": spec.mask.reason is not None or spec.mask.chosen is not None,
    }
    yield from (words for words, holds in facts.items() if holds)


def _body(spec: AttentionSpec, inputs: dict[str, str]) -> list[str]:
    """Return the lines of the computation, and add the tensors that it reads besides q, k and v to `inputs`."""
    score, dense, bias = spec.score, spec.mask.dense, spec.score.bias
    is_plain = not spec.decomposed and score.pointwise is None and score.sinks is None
    calls = spec.mask.flag is Flag.CALLED and dense is None and bias is None and is_plain
    lines, mask = [], "None"
    kinds = spec.mask.kinds if not calls and (dense is not None or spec.mask.flagged is not None) else ()
    try:
        if spec.mask.reason is not None or spec.mask.out_of_reach or spec.score.proved:
            raise _NotWritten
        if kinds:
            condition = masks.all_of(kinds)
            loads = {_name(load.tensor): _loaded(load, spec) for load in ix.loads(condition)}
            lines = [*_positions(spec), f"allowed = {_code(condition)}"]
            inputs |= loads
            mask = "allowed"
    except _NotWritten:
        lines = []
    if dense is not None and mask == "None":
        given = f"torch.rand({_row(dense.shape)}, device=DEVICE)"
        inputs["mask"] = f"{given} < 0.75" if dense.is_bool else f"{given}.to(torch.{dense.dtype})"
        mask = "mask"
    elif dense is not None:
        lines.append(f"allowed = allowed.expand({_row(dense.shape)})")
        if not dense.is_bool:
            low = f"torch.finfo(torch.{dense.dtype}).min"
            lines.append(
                f"allowed = torch.zeros(allowed.shape, dtype=torch.{dense.dtype}, device=DEVICE).masked_fill(~allowed, {low})"
            )
    if bias is not None:
        mask = _name(next((kind.tensor for kind in score.proved if isinstance(kind, Bias)), "added"))
        inputs[mask] = _random(_row(bias.shape), bias.dtype, needs_grad=bias.requires_grad)
    if score.sinks is not None:
        inputs["sinks"] = _random(_row((spec.num_heads_q,)), spec.dtype, needs_grad=score.sinks.requires_grad)
    gqa = ", enable_gqa=True" if spec.is_gqa else ""
    if is_plain:
        call = f"attn_mask={mask}, dropout_p={score.dropout_p}, is_causal={calls}, scale={score.scale!r}{gqa}"
        return [*lines, f"return F.scaled_dot_product_attention(q, k, v, {call})"]
    if spec.is_gqa:
        lines.append("k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))")
    lines.append(f"scores = q @ k.transpose(-1, -2) * {score.scale!r}")
    if score.softcap is not None:
        lines.append(f"scores = torch.tanh(scores / {score.softcap!r}) * {score.softcap!r}")
    if mask != "None":
        is_bool = bias is None and (dense is None or dense.is_bool)
        lines.append(f"scores = scores.masked_fill(~{mask}, -torch.inf)" if is_bool else f"scores = scores + {mask}")
    if score.sinks is not None:
        lines.append("scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), -1)")
    cut = "" if score.sinks is None else "[..., :-1]"
    lines.append(f"weights = scores.softmax(-1, dtype=torch.{score.softmax_dtype}){cut}.to(q.dtype)")
    lines += [f"weights = F.dropout(weights, {score.dropout_p})"] if score.dropout_p else []
    return [*lines, f"return (weights @ v).to(torch.{spec.out_dtype})"]


def _random(shape: str, dtype: str, *, needs_grad: bool) -> str:
    return f"torch.randn({shape}, device=DEVICE).to(torch.{dtype}).requires_grad_({needs_grad})"


def _positions(spec: AttentionSpec) -> list[str]:
    sizes = (spec.batch, spec.num_heads_q, spec.seqlen_q, spec.seqlen_kv)
    lines = ["Sq, Skv = q.shape[2], k.shape[2]"]
    for axis, (name, size) in enumerate(zip(_PLACES.values(), sizes, strict=True)):
        shape = ", ".join("-1" if axis == each else "1" for each in range(4))
        lines.append(f"{name} = torch.arange({size}, device=DEVICE).view({shape})")
    return lines


def _loaded(load: Load, spec: AttentionSpec) -> str:
    """Return code for a tensor of the shape that its indices need."""
    ends = {"b": spec.batch, "h": spec.num_heads_q, "q": spec.seqlen_q, "k": spec.seqlen_kv}
    if not all(isinstance(at, Index) and at.name in ends for at in load.at):
        raise _NotWritten
    dtype = {"bool": "bool", "int": "int64", "float": "float32"}[load.kind]
    return f"real({_row(tuple(ends[at.name] for at in load.at if isinstance(at, Index)))}, torch.{dtype})"


def _code(x: Expr) -> str:
    match x:
        case Const(value=value):
            return repr(value)
        case Index(name=name) if name in _PLACES:
            return _PLACES[name]
        case Size(name=name) if name.isidentifier():
            return name
        case Load(tensor=tensor, at=at):
            return _name(tensor) + (f"[{', '.join(map(_code, at))}]" if at else "")
        case Linear(terms=terms, const=const):
            said = [_code(term) if factor == 1 else f"{factor} * {_code(term)}" for term, factor in terms]
            return f"({' + '.join([*said, *([str(const)] if const or not said else [])])})"
        case Test(relation=relation, form=form):
            return f"({_code(form)} {relation} 0)"
        case Apply(op="and" | "or" as op, args=args):
            return f"({(' & ' if op == 'and' else ' | ').join(map(_code, args))})"
        case Apply(op=op, args=args) if op in _OPS:
            return _OPS[op].format(*map(_code, args))
    raise _NotWritten


def _name(tensor: str) -> str:
    own = re.sub(r"\W+", "_", tensor)
    return f"{own}_given" if own in _OWN or not own.isidentifier() else own


def _row(sizes: Iterable[int | str]) -> str:
    said = tuple(map(str, sizes))
    return f"({', '.join(said)}{',' * (len(said) == 1)})"


def _sizes(spec: AttentionSpec, body: Iterable[str], others: Iterable[str]) -> dict[str, object]:
    """Return code of functions and numbers of symbols in sizes, by their names. others: names that stand for tensors."""
    tensors = [x for x in (spec.q, spec.k, spec.v, spec.mask.dense, spec.score.bias) if x is not None]
    shapes = {size for x in tensors for size in x.shape if isinstance(size, str)}
    strides = {stride for x in (spec.q, spec.k, spec.v) for stride in x.strides if isinstance(stride, str)}
    said = " ".join([*sorted(shapes | strides), *body])
    functions: dict[str, object] = {name: code for name, code in _IN_SIZES.items() if re.search(rf"\b{name}\(", said)}
    symbols = sorted(set(re.findall(r"\b[a-z]{1,2}\d+\b", said)) - set(others))
    known = {name: eval(_IN_SIZES[name], {"math": math, "operator": operator}) for name in functions}
    known["__builtins__"] = {}
    ways = ((16, 8), (16 + 8 * len(symbols), -8), (512, 64), (8192, 64))
    numbers: list[dict[str, object]] = [
        {name: first + step * place for place, name in enumerate(symbols)} for first, step in ways
    ]
    # No size of a model is negative, and an empty one shows nothing.
    fit = (given for given in numbers if all(eval(size, known, dict(given)) > 0 for size in shapes))
    return functions | next(fit, numbers[0])
