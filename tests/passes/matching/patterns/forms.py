"""Spellings of attention: each is a function of named inputs, with what the compiler has to understand of it.

The names of a function's parameters say which tensors it gets (`INPUTS`). Sizes differ on purpose: with marked batch and
sequence axes (3 and 20, then 2 and 13) everything else stays static, and a specialised axis is an error.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_compiler.lowerings.shared.limits import mask_limits
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.spec.attention import AttentionSpec, Dim
from attn_compiler.spec.masks import Causal, Dense
from tests import numerics
from tests.passes.compiling import CPU_FLASH, WRITTEN_OUT, Compiled, compiled, mark

B, S, KEYS = 3, 20, 28
H, HKV, D, DV = 4, 2, 16, 8
OTHER_SIZES = {B: 2, S: 13, KEYS: 17}
DYNAMIC = tuple(OTHER_SIZES)

Shape = tuple[int, ...]
Function = Callable[..., Any]

#: name -> shape; "mask" is additive, "allowed" is bool, the rest are normal numbers
INPUTS: dict[str, Shape] = {
    "q": (B, H, S, D),
    "k": (B, H, S, D),
    "v": (B, H, S, D),
    "kv": (B, HKV, S, D),
    "one_kv": (B, 1, S, D),
    "keys": (B, H, KEYS, D),
    "values": (B, H, KEYS, DV),
    "x": (B, S, H * D),
    "qkv": (B, S, 3 * H * D),
    "mask": (B, 1, S, S),
    "allowed": (B, 1, S, S),
    "padding": (B, S),
    "bias": (1, H, S, S),
    "position_bias": (H, S, S),
    "sinks": (H,),
    "temperature": (),
}
DIFFERENTIABLE = ("q", "k", "v", "kv", "one_kv", "keys", "values", "x", "qkv")


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is expected of one spelling. q, k: shapes in the spec. score: its words. if_dynamic: fields that differ then.

    lowering: "untouched" where no kernel of PyTorch's serves it on a CPU. keeps: calls of WRITTEN_OUT that stay in the graph.
    trainable: further inputs that want a gradient.
    """

    function: Function
    q: Shape = (B, H, S, D)
    k: Shape = (B, H, S, D)
    mask: tuple[Causal | Dense, ...] = ()
    score: str = "scale 0.25"
    if_dynamic: Mapping[str, Any] = field(default_factory=dict)
    lowering: str = "sdpa_cpu_flash"
    keeps: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()
    returns_weights: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def parameters(self) -> list[str]:
        return list(inspect.signature(self.function).parameters)


@dataclass
class Collection:
    """The forms of one test file."""

    forms: list[Form] = field(default_factory=list)

    def form(self, **expected: Any) -> Callable[[Function], Function]:
        def add(function: Function) -> Function:
            self.forms.append(Form(function=function, **expected))
            return function

        return add


def dense(*shape: int, dtype: str = "float32", terms: int = 1) -> tuple[Causal | Dense, ...]:
    """The mask that one dense tensor makes."""
    return (Dense(shape=shape, dtype=dtype, terms=terms),)


# ---- running ------------------------------------------------------------------------------------------------------


def inputs(
    form: Form, *, dtype: torch.dtype = torch.float32, backward: bool = False, other: bool = False
) -> list[torch.Tensor]:
    """The form's tensors, always the same ones. other: at OTHER_SIZES."""
    tensors = []
    for position, name in enumerate(form.parameters):
        generator = torch.Generator().manual_seed(position)
        shape = [OTHER_SIZES.get(size, size) if other else size for size in INPUTS[name]]
        tensor = _tensor(name, shape, generator, dtype)
        wanted = backward and (name in DIFFERENTIABLE or name in form.trainable)
        tensors.append(tensor.requires_grad_(wanted))
    return tensors


def _tensor(name: str, shape: list[int], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    normal = torch.randn(shape, generator=generator)
    if name in ("allowed", "padding"):
        return _some_allowed(normal)
    if name == "mask":
        return torch.zeros(shape).masked_fill(~_some_allowed(normal), -1e9).to(dtype)
    return normal.to(dtype)


def _some_allowed(normal: torch.Tensor) -> torch.Tensor:
    """About two thirds, and always the first key: no row is without one."""
    allowed = normal < 0.4
    allowed[..., 0] = True
    return allowed


def results(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, then the gradients of every input that wants one, for fixed upstream gradients."""
    given = function(*tensors)
    outputs = list(given) if isinstance(given, tuple) else [given]
    wanted = [t for t in tensors if t.requires_grad]
    if not wanted:
        return outputs
    upstream = [torch.randn(o.shape, generator=torch.Generator().manual_seed(7)).to(o.dtype) for o in outputs]
    return outputs + list(torch.autograd.grad(outputs, wanted, upstream))


def check(form: Form, *, dynamic: bool, backward: bool) -> None:
    """Numbers equal to eager's at every size from one compilation, the spec, and what is left of the graph.

    With static sizes AOTAutograd differentiates the graph, elsewhere autograd does as it runs.
    """
    tensors = inputs(form, backward=backward)
    # "math" takes what CPU flash does not with gradients.
    offered = ["sdpa_cpu_flash", "math"] if form.lowering == "sdpa_cpu_flash" else ["sdpa_cpu_flash"]
    inner = "aot_eager" if backward and not dynamic else "eager"
    function = compiled(form.function, lowerings=offered, inner=inner)
    marked = [mark(t, DYNAMIC) for t in tensors] if dynamic else tensors
    assert_same(results(function, marked), results(form.function, tensors))
    expected = dataclasses.replace(form, **form.if_dynamic) if dynamic else form
    check_report(expected, function, dynamic=dynamic, backward=backward)
    if dynamic:
        others = inputs(form, backward=backward, other=True)
        assert_same(results(function, others), results(form.function, others))
        assert len(function.reports) == 1, "another size was compiled again"


def check_bfloat16(form: Form) -> None:
    """In bfloat16, no further from the exact result than twice what eager is."""
    tensors = inputs(form, dtype=torch.bfloat16, backward=True)
    exact = results(form.function, [_exact(t) for t in tensors])
    plain = results(form.function, tensors)
    got = results(compiled(form.function), tensors)
    for mine, usual, right in zip(got, plain, exact, strict=True):
        allowed = numerics.FACTOR * numerics.worst(usual, right) + numerics.floor(right, torch.bfloat16)
        assert mine.dtype == usual.dtype
        assert numerics.worst(mine, right) <= allowed


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().float().requires_grad_(tensor.requires_grad)


def assert_same(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Equal numbers; outputs (the first) also in equal strides, which whoever called the function may rely on."""
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, right, atol=2e-5, rtol=2e-5)
    assert got[0].stride() == wanted[0].stride()


# ---- what was understood ------------------------------------------------------------------------------------------


def check_report(form: Form, function: Compiled, *, dynamic: bool, backward: bool) -> None:
    site = function.site
    spec = site.spec
    assert site.decision.lowering == _lowering(form, spec), site.decision.refusals
    assert_shape(spec.q.shape, form.q, dynamic=dynamic)
    assert_shape(spec.k.shape, form.k, dynamic=dynamic)
    assert spec.needs_grad == backward
    assert spec.returns_weights == form.returns_weights
    assert spec.score.words == form.score
    assert_mask(site, form, dynamic=dynamic)
    assert_rewritten(form, function)


def _lowering(form: Form, spec: AttentionSpec) -> str:
    """CPU flash refuses numbers that may leave a query no key, where there are gradients."""
    return "math" if form.lowering == "sdpa_cpu_flash" and mask_limits.check_no_keyless_rows(spec) else form.lowering


def assert_shape(shape: Sequence[Dim], expected: Sequence[int], *, dynamic: bool) -> None:
    """A marked size has to be symbolic, every other one known."""
    assert len(shape) == len(expected)
    for size, wanted in zip(shape, expected, strict=True):
        if dynamic and any(wanted % marked == 0 for marked in DYNAMIC):
            assert isinstance(size, str), f"{shape} where {expected} was expected: specialised"
        else:
            assert size == wanted, f"{shape} where {expected} was expected"


def assert_mask(site: SiteReport, form: Form, *, dynamic: bool) -> None:
    mask = site.spec.mask
    applied = [each for each in (mask.flagged, mask.dense) if each is not None]
    assert [type(each) for each in applied] == [type(each) for each in form.mask], mask.words
    for kind, expected in zip(applied, form.mask, strict=True):
        if isinstance(kind, Dense) and isinstance(expected, Dense):
            assert_shape(kind.shape, expected.shape, dynamic=dynamic)
            assert (kind.dtype, kind.terms) == (expected.dtype, expected.terms)
        else:
            assert kind == expected


def assert_rewritten(form: Form, function: Compiled) -> None:
    lowering = function.site.decision.lowering
    if lowering in ("untouched", "math"):
        assert CPU_FLASH not in function.calls
        assert function.calls.count("_safe_softmax") == (lowering == "math")
        return
    assert function.calls.count(CPU_FLASH) == 1
    assert WRITTEN_OUT.intersection(function.calls) == set(form.keeps)
