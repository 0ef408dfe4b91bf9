"""Masks that are one thing off from a kind, or are of a kind for some inputs only: a case each, and how it is checked.

Three things are held: the compiled function is eager's; what the mask was proved to be is, for each pair, what it really is (each
kind's own `mask_mod` against the tensor that the model makes); and the report gives the words and the formula, or the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import attn_compiler
from attn_compiler.passes.recovering.reading import naming
from attn_compiler.spec.attention import AttentionSpec
from tests.near_miss.checking import BATCH, HEAD_DIM, HEADS, assert_same, normal
from tests.passes.compiling import captured
from tests.spec.meanings import Inputs, allows

Make = Callable[..., Tensor]
S, KEYS = 6, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """make: the mask, from inputs by name. words: of the kinds that it is proved to be. unproved: part of the reason otherwise; with
    words, the mask is those kinds and a rest that is not known.

    is_bias: it is no mask at all, and nothing may be said to be masked.
    """

    make: Make
    words: str = ""
    unproved: str = ""
    inputs: tuple[Callable[[], Tensor], ...] = ()
    keys: int = S
    dynamic: bool | None = None
    is_bias: bool = False


class MaskCases(dict[str, Case]):
    """Cases by name."""

    def near_miss(
        self,
        words: str = "",
        *,
        unproved: str = "",
        keys: int = S,
        dynamic: bool | None = None,
        is_bias: bool = False,
        **inputs: Callable[[], Tensor],
    ) -> Callable[[Make], Make]:
        """The decorated function makes a mask from its arguments, made anew for each side. It is a case of its own name."""

        def add(make: Make) -> Make:
            self.add(
                make.__name__, make, words, unproved=unproved, keys=keys, dynamic=dynamic, is_bias=is_bias, **inputs
            )
            return make

        return add

    def add(self, name: str, make: Make, words: str = "", /, **given: Any) -> None:
        """A case that is one expression. given: as to `near_miss`."""
        how = {key: given.pop(key) for key in ("unproved", "keys", "dynamic", "is_bias") if key in given}
        self[name] = Case(make=make, words=words, inputs=tuple(given.values()), **how)


def rows(n: int = S) -> Tensor:
    return torch.arange(n)[:, None]


def columns(n: int = S) -> Tensor:
    return torch.arange(n)[None, :]


def causal() -> Tensor:
    return columns() <= rows()


def whole(*numbers: object) -> Callable[[], Tensor]:
    """An input of whole numbers."""
    return lambda: torch.tensor(numbers)


# ---- the check --------------------------------------------------------------------------------------------------------


def _tensors(case: Case) -> list[Tensor]:
    kv = (BATCH, HEADS, case.keys, HEAD_DIM)
    return [
        normal(BATCH, HEADS, S, HEAD_DIM),
        normal(*kv, seed=1),
        normal(*kv, seed=2),
        *(make() for make in case.inputs),
    ]


def _attention(case: Case) -> Callable[..., Tensor]:
    """A function with the mask's arguments by their own names, since those are what the kinds read."""
    names = case.make.__code__.co_varnames[: case.make.__code__.co_argcount]
    head = ", ".join(("query", "key", "value", *names))
    source = (
        f"def attention({head}):\n    return sdpa(query, key, value, attn_mask=make({', '.join(names)}), scale=0.3)\n"
    )
    known: dict[str, Any] = {"sdpa": F.scaled_dot_product_attention, "make": case.make}
    # Under a file's name: torch 2.11 traces no code that has none, but what calls it, whose arguments have other names.
    exec(compile(source, __file__, "exec"), known)
    return known["attention"]  # type: ignore[no-any-return]


class _ByName(fx.Interpreter):
    """Runs Dynamo's graph and keeps each value under its node's name, and an input under the argument's."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values |= {n.name: value, n.name.removeprefix("l_").removesuffix("_"): value}
        if isinstance(value, Tensor):
            self.values.setdefault(naming.name_in_dynamo(n, value.dtype), value)
        return value


def _values(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> dict[str, Any]:
    gm, _ = captured(function, *inputs)
    by_name = {n.name.removeprefix("l_").removesuffix("_"): n for n in gm.graph.nodes if n.op == "placeholder"}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = {by_name[name]: tensor for name, tensor in zip(names, inputs, strict=True) if name in by_name}
    interpreter = _ByName(gm)
    interpreter.run(*(given[n] for n in gm.graph.nodes if n.op == "placeholder"))
    return interpreter.values


def _assert_true(spec: AttentionSpec, case: Case, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """What was proved is the mask itself, for every pair. Of one that was read in part: what was proved, and its rest."""
    mask, seqlens = spec.mask, (spec.seqlen_q, spec.seqlen_kv)
    values = _values(function, inputs)
    real = case.make(*inputs[3:]).expand(BATCH, HEADS, S, case.keys)
    sizes = {str(d): n for d, n in zip(seqlens, (S, case.keys), strict=True)}
    known = Inputs(seqlen_q=S, seqlen_kv=case.keys, load=lambda name, at: values[name][at].item(), sizes=sizes)
    for at in itertools.product(*map(range, real.shape)):
        claimed = all(allows(kind, *at, known) for kind in mask.read)
        allowed = bool(real[at]) if real.dtype == torch.bool else real[at].item() == 0
        if mask.rest is not None:
            claimed = claimed and allows(mask.rest, *at, known)
        elif mask.is_partial:
            claimed = claimed and allowed
        assert claimed == allowed, f"{mask.words} at {at}"


def check(case: Case) -> None:
    """Compile an attention with the mask of the case, compare it with eager, and hold what was proved against the mask."""
    function = _attention(case)
    assert_same(function, lambda: _tensors(case), dynamic=case.dynamic)
    (report,) = attn_compiler.reports()
    (site,) = report.sites
    mask = site.spec.mask
    assert " ∧ ".join(kind.words for kind in mask.read) == case.words, mask
    if case.is_bias:
        assert mask.read == ()
        assert mask.dense is not None or site.spec.score.bias is not None
        return
    if mask.read:
        _assert_true(site.spec, case, function, _tensors(case))
        assert mask.formula in report.details().replace("\n", " ") or len(mask.formula or "") > 60
        assert "(proved)" in str(report)
    if mask.read and not case.unproved:
        assert mask.reason is None
        return
    assert mask.reason
    assert case.unproved in mask.reason, mask.reason
    assert mask.dense is not None
    assert "unproved" in report.details()
