"""The computation that a `LinearForm` describes, in tensors: operands to q, k, v, g, beta and state, the recurrence, and the outputs.

Proofs, `verify` and tests compare everything with `definition`, which goes token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.spec.linear import LinearForm


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearOperands:
    """The operands of the recurrence, all in its compute dtype, with as many heads of q and k as of v.

    q, k: (B, S, H, K).
    v: (B, S, H, V).
    g: (B, S, H) or, where each channel has a decay, (B, S, H, K); the decay is exp(g).
    beta: (B, S, H); None without the delta rule.
    state: (B, H, K, V); None: it begins at 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None
    state: Tensor | None = None

    @property
    def first_state(self) -> Tensor:
        """State before the first token."""
        if self.state is not None:
            return self.state
        batch, _, heads, dim = self.k.shape
        return self.v.new_zeros(batch, heads, dim, self.v.shape[-1])


def prepared(form: LinearForm, operands: Sequence[Tensor]) -> LinearOperands:
    """Compute the operands of the recurrence from those of the function."""
    given = dict(zip(form.roles, operands, strict=True))
    return _of_ssd(form, given) if form.recurrence == "ssd" else _of_delta(form, given)


def finished(form: LinearForm, operands: Sequence[Tensor], out: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Convert `out` (B, S, H, V) and the last state of the recurrence to the function's outputs, in its dtypes and layouts."""
    if form.recurrence == "ssd":
        given = dict(zip(form.roles, operands, strict=True))
        if "D" in given:
            out = out + given["D"][..., None] * given["x"].to(out.dtype)
        state = state.transpose(-1, -2)
    out_dtype, state_dtype = getattr(torch, form.out_dtype), getattr(torch, form.state_dtype)
    return out.to(out_dtype).contiguous(), state.to(state_dtype).contiguous()


def definition(form: LinearForm, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute the function's outputs, token by token."""
    return finished(form, operands, *token_by_token(prepared(form, operands)))


def token_by_token(given: LinearOperands) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token. Returns o (B, S, H, V), and the state after the last token."""
    state, outs = given.first_state, []
    decay = given.g.exp() if given.g.dim() == 4 else given.g.exp().unsqueeze(-1)
    for t in range(given.v.shape[1]):
        state = state * decay[:, t].unsqueeze(-1)
        value = given.v[:, t]
        if given.beta is not None:
            value = given.beta[:, t].unsqueeze(-1) * (value - torch.einsum("bhk,bhkv->bhv", given.k[:, t], state))
        state = state + given.k[:, t].unsqueeze(-1) * value.unsqueeze(-2)
        outs.append(torch.einsum("bhk,bhkv->bhv", given.q[:, t], state))
    return torch.stack(outs, 1), state


def _wide(form: LinearForm) -> torch.dtype:
    """Return the compute dtype: float32 for all operands, or float64 for a function whose state is float64."""
    return torch.float64 if form.state_dtype == "float64" else torch.float32


def normalised(x: Tensor, eps: float | None) -> Tensor:
    """Divide q or k by its norm. eps None: the function does not normalise."""
    return x if eps is None else x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _of_delta(form: LinearForm, given: dict[str, Tensor]) -> LinearOperands:
    wide = {role: x.to(_wide(form)) for role, x in given.items()}
    q, k, v = wide["q"], wide["k"], wide["v"]
    q, k = (normalised(x, form.eps) for x in (q, k))
    q = q * k.shape[-1] ** -0.5
    q, k = _for_each_head(q, v), _for_each_head(k, v)
    return LinearOperands(q=q, k=k, v=v, g=wide["g"], beta=wide["beta"], state=wide.get("state"))


def steps(form: LinearForm, given: Mapping[str, Tensor]) -> Tensor:
    """Return dt of a state-space model as the recurrence uses it, after bias, softplus and limits."""
    dt = given["dt"]
    if "dt_bias" in given:
        dt = dt + given["dt_bias"].to(dt.dtype)
    if form.softplus:
        dt = F.softplus(dt)
    return dt if form.limits is None else dt.clamp(*form.limits)


def _of_ssd(form: LinearForm, given: dict[str, Tensor]) -> LinearOperands:
    dt, dtype = steps(form, given), _wide(form)
    x, dt, k, q = given["x"].to(dtype), dt.to(dtype), given["B"].to(dtype), given["C"].to(dtype)
    state = given["state"].to(dtype).transpose(-1, -2) if "state" in given else None
    q, k = _for_each_head(q, x), _for_each_head(k, x)
    return LinearOperands(q=q, k=k, v=x * dt.unsqueeze(-1), g=given["A"].to(dtype) * dt, state=state)


def _for_each_head(x: Tensor, v: Tensor) -> Tensor:
    groups = v.shape[2] // x.shape[2]
    return x if groups == 1 else x.repeat_interleave(groups, dim=2)
