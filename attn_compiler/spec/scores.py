"""Changes of the scores between the two products, besides masking. Pure data, no FX, no CUDA.

s = scale · (q kᵀ);  s = softcap · tanh(s / softcap);  s = s + bias;  p = dropout(softmax([s, sinks])[..., :Skv])

To add a score change: one class here with `words`, its name in KINDS, and its test. A change of each score by itself is a `Pointwise`: its
recogniser and its lowering know it by that, and docs/changes.md names the places of its own lines. Proved kinds of an added tensor are in
added_scores.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.spec.codec import UNSAID


class Pointwise:
    """Base of changes of each score by itself: one number, and factors on either side. They come before masks and biases. Lowerings apply
    them by their `Form` (lowerings/shared/parts/score_changes.py)."""

    __slots__ = ()

    @property
    def words(self) -> str:
        raise NotImplementedError

    @property
    def number(self) -> float:
        """The parameter of the change."""
        raise NotImplementedError

    @property
    def most(self) -> float:
        """The largest magnitude of a changed score."""
        raise NotImplementedError

    def scaled(self, factor: float) -> Pointwise:
        """Return the change c with c(factor · s) = factor · self(s)."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Softcap(Pointwise):
    """s -> cap · tanh(s / cap) (Gemma 2). cap: positive; with −cap it is the same."""

    cap: float

    @property
    def words(self) -> str:
        return f"softcap {self.cap:g}"

    @property
    def number(self) -> float:
        """The cap."""
        return self.cap

    @property
    def most(self) -> float:
        """The cap."""
        return self.cap

    def scaled(self, factor: float) -> Softcap:
        """Scale the cap: factor · cap · tanh(s / cap) is the softcap of factor · cap at factor · s."""
        return Softcap(cap=abs(self.cap * factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sinks:
    """One learned logit for each head that joins the softmax and is dropped after it (gpt-oss)."""

    requires_grad: bool

    @property
    def words(self) -> str:
        return "sinks"


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseBias:
    """An additive tensor that requires a gradient, broadcasting to (B, Hq, Sq, Skv): T5's and Swin's learned biases."""

    shape: tuple[int | str, ...]
    dtype: str
    requires_grad: bool = True

    @property
    def words(self) -> str:
        return f"bias[{', '.join(str(d) for d in self.shape)}] with gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusual:
    """A recognised score change without a kind: described, and refused by every fused lowering."""

    what: str

    @property
    def words(self) -> str:
        return self.what


ScoreChange = Pointwise | Sinks | DenseBias | Unusual
KINDS: tuple[type[ScoreChange], ...] = (Softcap, Sinks, DenseBias, Unusual)


def pointwise(changes: Iterable[ScoreChange]) -> Pointwise | None:
    """Return the change of each score by itself. More than one is refused (lowerings/shared/limits/takes.py)."""
    return next((change for change in changes if isinstance(change, Pointwise)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSpec:
    """Scaling, changes and additions of the scores.

    scale: the factor on q kᵀ that a kernel applies.
    runtime_scale: a further factor is known at run time only (a tensor or a symbolic float). It multiplies q in the graph, before the
        kernel.
    changes: the changes that a lowering has to apply, in order.
    dropout_p: the share of dropped weights.
    softmax_dtype: the dtype that the model's own softmax ran in.
    proved: kinds whose sum equals the added tensors, besides their masks. They describe a DenseBias or a mask's Dense tensor; a lowering
        has to apply the tensor or these, not both.
    by_highest: the highest number that the dense tensor adds to a row leaves the keys with less no weight (recovering/highest.py).
    out_of_reach: as in MaskSpec.
    """

    scale: float
    runtime_scale: bool = False
    changes: tuple[ScoreChange, ...] = ()
    dropout_p: float = 0.0
    softmax_dtype: str = "float32"
    proved: tuple[ProvedScore, ...] = ()
    out_of_reach: tuple[str, ...] = ()
    by_highest: bool = field(default=False, metadata=UNSAID)

    @property
    def pointwise(self) -> Pointwise | None:
        return pointwise(self.changes)

    @property
    def softcap(self) -> float | None:
        return next((c.cap for c in self.changes if isinstance(c, Softcap)), None)

    @property
    def sinks(self) -> Sinks | None:
        return next((c for c in self.changes if isinstance(c, Sinks)), None)

    @property
    def bias(self) -> DenseBias | None:
        return next((c for c in self.changes if isinstance(c, DenseBias)), None)

    @property
    def words(self) -> str:
        parts = [f"scale {self.scale:.6g}" + (" × run-time factor" if self.runtime_scale else "")]
        parts += [change.words for change in self.changes]
        if self.dropout_p:
            parts.append(f"dropout {self.dropout_p:g}")
        return ", ".join(parts)

    @property
    def added(self) -> str | None:
        """The proved additions, besides masks; None if nothing."""
        found = " + ".join(kind.words for kind in self.proved) or None
        return f"{found}, whose highest number masks the others (proved)" if self.by_highest else found
