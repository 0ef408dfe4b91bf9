"""`Fp8Recipe`: the attentions that run in FP8, and the scaling of their tensors. Frozen data: the compile key holds all of it.

Scales, amax values and their history are no part of a recipe. They are tensors of the compiled graph, so their values never choose a kernel
and never cause a recompilation.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import dataclass
from typing import Any, Literal

from attn_compiler.reasons.errors import InvalidOption

#: largest finite number of each format: https://arxiv.org/abs/2209.05433
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
#: of int8, used symmetrically
_LARGEST_INT8 = 127.0
#: torch's names, without the prefix
DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "int8": "int8"}

#: Positions that share a scale are whole tiles of the kernels, of up to this many keys.
BLOCK_MULTIPLE = 128
_MOST_MARGIN = 16
#: bounds of static magnitudes: their scales and descales are normal numbers of float32
_MAGNITUDES = (1e-30, 1e30)

Granularity = Literal["tensor", "head", "block"]


def largest_of(format_: str) -> float:
    """Return the largest number that a format of DTYPES rounds to."""
    return LARGEST.get(format_, _LARGEST_INT8)


def _margin(value: Any) -> None:
    if not _is_int(value) or not 0 <= value <= _MOST_MARGIN:
        raise _invalid("margin", f"a whole number from 0 to {_MOST_MARGIN}", value)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _invalid(name, f"one of {', '.join(map(repr, allowed))}", value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(name: str, expected: str, value: Any) -> InvalidOption:
    return InvalidOption(option=f"fp8_recipe: {name}", expected=expected, value=value)


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentScaling:
    """Scales from the tensors themselves, in each step.

    granularity: one scale for a tensor, for each head of a batch row, or for each `block` positions of such a head. A block takes one pass
    over memory instead of two. margin: scales are 2**margin smaller than the largest that fits.
    """

    granularity: Granularity = "block"
    block: int = BLOCK_MULTIPLE
    margin: int = 0

    def __post_init__(self) -> None:
        _one_of("granularity", self.granularity, ("tensor", "head", "block"))
        _margin(self.margin)
        if not _is_int(self.block) or self.block < BLOCK_MULTIPLE or self.block % BLOCK_MULTIPLE:
            raise _invalid("block", f"a positive multiple of {BLOCK_MULTIPLE}", self.block)


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedScaling:
    """Scales from the largest values of earlier steps: q, k and v are read once. The first step has scales of 1.

    amax_history_len: the number of kept steps. amax_compute_algo: the largest of them, or the last one's. Values beyond the range of their
    scale saturate. One scale for each tensor, or for each of its heads (granularity).
    """

    amax_history_len: int = 16
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    granularity: Literal["tensor", "head"] = "tensor"
    margin: int = 0

    def __post_init__(self) -> None:
        if not _is_int(self.amax_history_len) or self.amax_history_len < 1:
            raise _invalid("amax_history_len", "a positive number of steps", self.amax_history_len)
        _one_of("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        _one_of("granularity", self.granularity, ("tensor", "head"))
        _margin(self.margin)


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticScaling:
    """Fixed scales: the magnitudes of q, k and v that map to the format's largest number. Values beyond saturate."""

    q: float
    k: float
    v: float

    def __post_init__(self) -> None:
        for name in ("q", "k", "v"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not _MAGNITUDES[0] <= value <= _MAGNITUDES[1]:
                raise _invalid(f"StaticScaling.{name}", "a magnitude from {:g} to {:g}".format(*_MAGNITUDES), value)
            object.__setattr__(self, name, float(value))


Scaling = CurrentScaling | DelayedScaling | StaticScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Recipe:
    """`options={"fp8_recipe": Fp8Recipe()}`: attention in FP8 where a kernel can. Checked when built (InvalidOption).

    scaling: the source of scales. forward, backward: which of the two runs in FP8. forward_format: of q, k, v and the softmax's weights;
    gradient_format: of gradients, if the backward runs in FP8.

    qk_format: "int8" makes q and k integers up to 127 instead, as SageAttention does (https://arxiv.org/abs/2410.02367). It is finer if
    values are alike, as hadamard makes them, and products are exact. int8 has no NaN: non-finite values become 0.

    exclude: patterns (fnmatch) of module paths whose attention stays as it is ("*layers.0.*": paths begin at the compiled module).
    smooth_k: subtract from k its mean over the sequence, which changes no weight. hadamard: rotate q and k by the same orthogonal matrix,
    which spreads outliers over the head dim and changes no score. force: use FP8 also where it was measured to be slower than the model's
    own dtype.
    """

    scaling: Scaling = CurrentScaling()
    forward: bool = True
    backward: bool = False
    forward_format: Literal["e4m3", "e5m2"] = "e4m3"
    gradient_format: Literal["e4m3", "e5m2"] = "e5m2"
    qk_format: Literal["fp8", "int8"] = "fp8"
    exclude: tuple[str, ...] = ()
    smooth_k: bool = False
    hadamard: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.scaling, Scaling):
            raise _invalid("scaling", "a CurrentScaling, DelayedScaling or StaticScaling", self.scaling)
        for name in ("forward", "backward", "smooth_k", "hadamard", "force"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, "True or False", getattr(self, name))
        for name in ("forward_format", "gradient_format"):
            _one_of(name, getattr(self, name), tuple(LARGEST))
        _one_of("qk_format", self.qk_format, ("fp8", "int8"))
        if not self.forward and not self.backward:
            raise _invalid(
                "forward", "True where backward is False: a recipe for neither asks for nothing", self.forward
            )
        is_patterns = isinstance(self.exclude, tuple | list) and all(isinstance(p, str) and p for p in self.exclude)
        if not is_patterns:
            raise _invalid("exclude", "a list of patterns of module paths", self.exclude)
        object.__setattr__(self, "exclude", tuple(self.exclude))

    def excluding(self, module: str) -> str | None:
        """Return the first pattern that excludes a module path; None if none does."""
        return next((pattern for pattern in self.exclude if fnmatch.fnmatchcase(module, pattern)), None)

    def for_site(self) -> Fp8Recipe:
        """Return the recipe without patterns, so that equal layers share a decision: exclusion is decided by then."""
        return dataclasses.replace(self, exclude=())

    def format_of(self, name: str) -> str:
        """Return the format of "q", "k" or "v": a name of DTYPES."""
        return "int8" if name in ("q", "k") and self.qk_format == "int8" else self.forward_format

    def largest_of(self, name: str) -> float:
        """Return the largest number of the format of "q", "k" or "v"."""
        return largest_of(self.format_of(name))

    @property
    def words(self) -> str:
        """For people: "e4m3, current scaling per head, smooth_k"."""
        further = [name for name in ("smooth_k", "hadamard") if getattr(self, name)]
        further += ["q and k in int8"] if self.qk_format == "int8" else []
        return ", ".join((self.forward_format, _scaling_words(self.scaling), *further))


#: classes of a recipe in a spec's text
PARTS = (Fp8Recipe, CurrentScaling, DelayedScaling, StaticScaling)


def _scaling_words(scaling: Scaling) -> str:
    match scaling:
        case CurrentScaling(granularity="block", block=block):
            return f"current scaling per block of {block}"
        case CurrentScaling(granularity=granularity):
            return f"current scaling per {granularity}"
        case DelayedScaling(granularity=granularity, amax_history_len=length, amax_compute_algo=algorithm):
            return f"delayed scaling per {granularity} ({algorithm} of {length})"
        case StaticScaling(q=q, k=k, v=v):
            return f"static scaling (q {q:g}, k {k:g}, v {v:g})"
