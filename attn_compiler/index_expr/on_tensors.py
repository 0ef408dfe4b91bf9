"""An expression's value at many indices at once: `evaluate` with tensors instead of numbers.

Integers are int64, other numbers float64 (as `Tensor.item` gives), truth values bool. Equal to `evaluate` element by element, as long as
integers stay below 2**63.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from attn_compiler.index_expr.looking import loads_last
from attn_compiler.index_expr.nodes import Apply, Const, Expr, Index, Linear, Load, Size, Test

Indices = tuple[torch.Tensor, ...]


def evaluate_on(
    x: Expr, values: Mapping[str, int | torch.Tensor], tensors: Mapping[str, torch.Tensor], *, nudge: float = 0.0
) -> torch.Tensor:
    """Evaluate `x` at every element of the index tensors, which broadcast against each other.

    values: of the indices and the symbolic sizes. tensors: read by the loads. A load's index must lie within its tensor wherever its value
    counts. As in `evaluate`, a value does not count in the branch of a choice that is not taken, nor in a part of a junction that another
    part without loads decides.

    nudge: relative increase of a float before it is cut to an integer, to see the effect of rounding.

    Result: bool, int64 or float64, on the device of the index tensors. Raises KeyError for a name without a value, IndexError and
    ZeroDivisionError where `evaluate` would, NotImplementedError for an op without a function here.
    """
    device = next((v.device for v in values.values() if isinstance(v, torch.Tensor)), torch.device("cpu"))
    return _Evaluation(values, tensors, device, nudge).value(x, None)


@dataclass(frozen=True)
class _Evaluation:
    """counts, in its methods: True where the result uses the value; None for everywhere."""

    values: Mapping[str, int | torch.Tensor]
    tensors: Mapping[str, torch.Tensor]
    device: torch.device
    nudge: float

    def value(self, x: Expr, counts: torch.Tensor | None) -> torch.Tensor:
        match x:
            case Const(value=value):
                return self._number(value)
            case Index(name=name) | Size(name=name):
                known = self.values[name]
                return known if isinstance(known, torch.Tensor) else self._number(known)
            case Load(tensor=tensor, at=at):
                return self._loaded(tensor, tuple(_whole(self.value(a, counts)) for a in at), counts)
            case Linear(terms=terms, const=const):
                parts = (_whole(self.value(term, counts)) * factor for term, factor in terms)
                return reduce(torch.add, parts, self._number(const))
            case Test(relation=relation, form=form):
                return _RELATIONS[relation](self.value(form, counts))
            case Apply(op="where", args=(condition, yes, no)):
                return self._chosen(_truth(self.value(condition, counts)), yes, no, counts)
            case Apply(op="int", args=(a,)) if self.nudge:
                return _whole(_real(self.value(a, counts)) * (1.0 + self.nudge))
            case Apply(op="and" | "or" as op, args=args):
                return self._junction(args, counts, decides=op == "or")
            case Apply(op="floordiv" | "mod" as op, args=(a, b)):
                return self._divided(op, self.value(a, counts), self.value(b, counts), counts)
            case Apply(op=op, args=args):
                if op not in ON_TENSORS:
                    raise NotImplementedError(f"the op {op!r} of index expressions has no meaning on tensors yet")
                return ON_TENSORS[op](*(self.value(a, counts) for a in args))

    def _number(self, value: bool | int | float) -> torch.Tensor:
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
        return torch.tensor(value, dtype=dtype, device=self.device)

    def _chosen(self, condition: torch.Tensor, yes: Expr, no: Expr, counts: torch.Tensor | None) -> torch.Tensor:
        taken, left = self.value(yes, _both(counts, condition)), self.value(no, _both(counts, ~condition))
        return torch.where(condition, *_alike(taken, left))

    def _junction(self, args: Sequence[Expr], counts: torch.Tensor | None, *, decides: bool) -> torch.Tensor:
        result: torch.Tensor | None = None
        for arg in loads_last(args):
            open_still = counts if result is None else _both(counts, result != decides)
            value = _truth(self.value(arg, open_still))
            result = value if result is None else result | value if decides else result & value
        return self._number(not decides) if result is None else result

    def _loaded(self, name: str, at: Indices, counts: torch.Tensor | None) -> torch.Tensor:
        tensor = self.tensors[name].to(self.device)
        if len(at) != tensor.dim():
            raise IndexError(f"{name} has {tensor.dim()} dimensions, and is read at {len(at)} indices")
        inside = []
        for dim, (index, size) in enumerate(zip(at, tensor.shape, strict=True)):
            outside = (index < -size) | (index >= size)
            if bool(_both(counts, outside).any()):
                raise IndexError(f"{name} has size {size} in dimension {dim}, and is read beyond that")
            inside.append(index.clamp(-size, size - 1))
        return _exact(tensor[tuple(inside)] if inside else tensor)

    def _divided(self, op: str, a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        a, b = _numbers(a), _numbers(b)
        zero = b == 0
        if bool(_both(counts, zero).any()):
            raise ZeroDivisionError(f"{op} by zero")
        # Where nothing counts, divide by one: integer division by zero fails.
        return ON_TENSORS[op](a, torch.where(zero, torch.ones_like(b), b))


def _both(counts: torch.Tensor | None, condition: torch.Tensor) -> torch.Tensor:
    return condition if counts is None else counts & condition


def _exact(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.bool:
        return x
    return x.to(torch.float64 if x.dtype.is_floating_point else torch.int64)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """Convert truth values to 0 and 1, since a sum of bools is a bool."""
    return x.to(torch.int64) if x.dtype == torch.bool else x


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64)


def _real(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64)


def _truth(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.bool else x != 0


def _alike(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


_RELATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    ">=": lambda form: form >= 0,
    "==": lambda form: form == 0,
    "!=": lambda form: form != 0,
}

#: the ops of OPS, but for `where` and the junctions: name -> function of tensors
ON_TENSORS: dict[str, Callable[..., torch.Tensor]] = {
    "not": lambda x: ~_truth(x),
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "mod": torch.remainder,
    "mul": lambda a, b: _numbers(a) * _numbers(b),
    "add": lambda a, b: _numbers(a) + _numbers(b),
    "div": lambda a, b: _real(a) / _real(b),
    "abs": lambda x: _numbers(x).abs(),
    "min": lambda a, b: torch.minimum(*_alike(_numbers(a), _numbers(b))),
    "max": lambda a, b: torch.maximum(*_alike(_numbers(a), _numbers(b))),
    "eq": lambda a, b: _numbers(a) == _numbers(b),
    "lt": lambda a, b: _numbers(a) < _numbers(b),
    "float": _real,
    "rounded": _real,
    "int": _whole,
    "log": lambda x: _real(x).log(),
    "exp": lambda x: _real(x).exp(),
    "pow": lambda a, b: _real(a).pow(_real(b)),
    "xor": lambda a, b: _truth(a) ^ _truth(b),
}
