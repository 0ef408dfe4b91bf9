"""What happens to the scores between the two products, besides masking. Pure data, no FX, no CUDA.

    s = scale · (q kᵀ);  s = softcap · tanh(s / softcap);  s = s + bias;  p = dropout(softmax([s, sinks])[..., :Skv])

To add a score change: one class here with `words`, its name in KINDS, a field or an entry of `changes`, and its test.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Softcap:
    """s -> cap · tanh(s / cap), before masks and biases (Gemma 2)."""

    cap: float

    @property
    def words(self) -> str:
        return f"softcap {self.cap:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sinks:
    """One learned logit a head joins the softmax and is dropped after it (gpt-oss)."""

    requires_grad: bool

    @property
    def words(self) -> str:
        return "sinks"


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseBias:
    """An additive tensor that wants a gradient, broadcasting to (B, Hq, Sq, Skv): T5's and Swin's learned biases."""

    shape: tuple[int | str, ...]
    dtype: str
    requires_grad: bool = True

    @property
    def words(self) -> str:
        return f"bias[{', '.join(str(d) for d in self.shape)}] with gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusual:
    """A score change that was recognised and has no kind of its own yet: described, and refused by every fused lowering."""

    what: str

    @property
    def words(self) -> str:
        return self.what


ScoreChange = Softcap | Sinks | DenseBias | Unusual
KINDS: tuple[type[ScoreChange], ...] = (Softcap, Sinks, DenseBias, Unusual)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSpec:
    """scale: the factor on q kᵀ that a kernel applies. runtime_scale: a further factor is only known at run time
    (a tensor or a symbolic float) and multiplies q in the graph, before the kernel. softmax_dtype: dtype the model's
    own softmax ran in."""

    scale: float
    runtime_scale: bool = False
    changes: tuple[ScoreChange, ...] = ()
    dropout_p: float = 0.0
    softmax_dtype: str = "float32"

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
