"""The spec of linear attention, as frozen data: the recurrence of a function, and one call of it.

S ← diag(exp g) S;  u = beta (v - Sᵀ k), or v;  S ← S + k uᵀ;  o = Sᵀ q

S is the state of a head, (K, V). graph_ops/linear_recurrence.py computes it on tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_compiler.spec.attention import Dim
from attn_compiler.spec.codec import Codec, Coded

#: "delta": u has the delta rule, and g is given. "ssd": Mamba-2's state space, u = v = dt x, g = A dt, q = C, k = B.
LinearKind = Literal["delta", "ssd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearForm(Coded):
    """The recurrence that a function computes, for all sizes.

    function: the model's own, by its module, its name and a digest of its text.
    recurrence: its kind.
    roles: of the operands, in their order. delta: q, k, v, g, beta and perhaps state. ssd: x, dt, A, B, C and perhaps D, dt_bias, state.
    channel: the decay is one for each channel of k, and not one for a head.
    chunk: tokens that the function takes at once; 1 if it goes token by token.
    eps: q and k are divided by the root of their sum of squares plus eps; None if they are not normalised.
    softplus: dt goes through softplus.
    limits: the clamp of dt.
    out_dtype, state_dtype: of the function's results.
    precision: "exact", or "fla": as exact as flash-linear-attention, with which the user asked `linear_triton` to compute it.
    """

    function: str
    recurrence: LinearKind
    roles: tuple[str, ...]
    channel: bool = False
    chunk: int = 1
    eps: float | None = None
    softplus: bool = False
    limits: tuple[float, float] | None = None
    out_dtype: str = "float32"
    state_dtype: str = "float32"
    precision: str = "exact"

    @property
    def has_state(self) -> bool:
        """True if the call passes a state, from which the recurrence continues."""
        return "state" in self.roles

    @property
    def text(self) -> str:
        """Canonical text."""
        return self.to_text()

    @property
    def name(self) -> str:
        """For people."""
        return "gated delta rule" if self.recurrence == "delta" else "state space (Mamba-2)"


LinearForm.codec = Codec((LinearForm,), brief=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSpec:
    """One call of such a function, with everything that a lowering may decide on.

    batch, length: sizes, symbolic if Dynamo does not know them.
    num_heads_k: heads of q and k. Head h of v reads head h // (Hv // Hk).
    num_heads_v: heads of v, and of the state.
    head_dim_k, head_dim_v: the state of a head is (K, V).
    dtype: of q, or of x.
    device: "cpu" or "cuda".
    needs_grad: the call's results are differentiated.
    """

    form: LinearForm
    batch: Dim
    length: Dim
    num_heads_k: int
    num_heads_v: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    device: str
    needs_grad: bool = False

    @property
    def words(self) -> str:
        """For people: "gated delta rule, 4 heads of 16/16, decay a head"."""
        heads = f"{self.num_heads_v} head{'s' if self.num_heads_v > 1 else ''} of {self.head_dim_k}/{self.head_dim_v}"
        grouped = "" if self.num_heads_k == self.num_heads_v else f", {self.num_heads_k} of q and k"
        decay = "channel" if self.form.channel else "head"
        state = ", with a state" if self.form.has_state else ""
        is_exact = self.form.precision == "exact" or self.dtype != "bfloat16"
        tier = "" if is_exact else f", as exact as {self.form.precision}"
        return f"{self.form.name}, {heads}{grouped}, decay a {decay}{state}{tier}"
