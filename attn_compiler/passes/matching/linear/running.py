"""Call a model's function by the roles of its operands: for `verify`, for proofs, and for a graph that is given back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_compiler.passes.matching.linear.draws import SORTS, DrawSizes
from attn_compiler.passes.matching.linear.source import Source
from attn_compiler.passes.matching.linear.templates import Template
from attn_compiler.reasons.errors import described
from attn_compiler.spec.linear import LinearForm
from attn_compiler.torch_private import compat as torch_compat, substitution

_NORMALISED = "use_qk_l2norm_in_kernel"
#: eps that functions with the normalisation flag add to a sum of squares
EPS = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposed:
    """A function that has the parameters of a template.

    name: its module, its name and the digest of its text. own: the model's function. template: its parameters.
    text: everything that it reads, and the reason against it if there is one. source: its line.
    """

    name: str
    own: Callable[..., Any]
    template: Template
    text: Source
    source: str

    @property
    def called(self) -> str:
        """Its name in the model's code."""
        return self.own.__name__

    def run(self, form: LinearForm, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the output and the last state, in the layout of `linear_call`."""
        given = dict(zip(form.roles, operands, strict=True))
        return self._one_token(form, given) if self.template.gives == "out, writes" else self._whole(form, given)

    def _whole(self, form: LinearForm, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        template = self.template
        named = {parameter: given.get(role) for role, parameter in template.operands.items()}
        flag = {} if template.state_flag is None else {template.state_flag: True}
        out, last = self.own(**named, **settings(template, form), **flag, **template.fixed)
        return out, last

    def _one_token(self, form: LinearForm, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Run one token. Values for each head are broadcast over its channels, as the function expects."""
        x = given["x"]
        dim, size = x.shape[-1], given["B"].shape[-1]
        state = given["state"].clone()
        named: dict[str, Tensor | None] = {
            "x": x[:, 0],
            "dt": given["dt"][:, 0, :, None].expand(-1, -1, dim),
            "A": given["A"][:, None, None].expand(-1, dim, size),
            "B": given["B"][:, 0],
            "C": given["C"][:, 0],
            "state": state,
        }
        for role in ("D", "dt_bias"):
            named[role] = given[role][:, None].expand(-1, dim) if role in given else None
        by_parameter = {self.template.operands[role]: value for role, value in named.items()}
        out = self.own(**by_parameter, **settings(self.template, form), **self.template.fixed)
        return out.unsqueeze(1), state


def settings(template: Template, form: LinearForm) -> dict[str, Any]:
    """Return the numbers and flags of a form, by the parameters of a template."""
    known: dict[str, Any] = {
        "chunk_size": form.chunk,
        _NORMALISED: form.eps is not None,
        "dt_softplus": form.softplus,
        "dt_limit": form.limits,
    }
    return {name: known[name] for name in template.settings}


def form_of(proposed: Proposed, roles: tuple[str, ...], given: Mapping[str, Any], *, channel: bool) -> LinearForm:
    """Return the form of a function with these operands and settings, before the dtypes of its results are known."""
    template = proposed.template
    named = {name: given[name] for name in template.settings}
    limits = named.get("dt_limit")
    return LinearForm(
        function=proposed.name,
        recurrence=template.recurrence,
        roles=roles,
        channel=channel,
        chunk=1 if template.by_token else int(named["chunk_size"]),
        eps=EPS if named.get(_NORMALISED) else None,
        softplus=bool(named.get("dt_softplus", False)),
        limits=None if limits is None else (float(limits[0]), float(limits[1])),
    )


def dtypes_of(
    proposed: Proposed, form: LinearForm, dtypes: Mapping[str, torch.dtype], *, grouped: bool
) -> tuple[str, str] | str:
    """Return the dtypes of a function's results for operands of these dtypes, or the reason why they are unknown.

    The function runs once on small tensors. All sizes of the run differ, and the results must have the shapes of the recurrence.
    grouped: there are fewer heads of k than of v.
    """
    try:
        return _dtypes_of(proposed, form, tuple(dtypes.items()), grouped, torch.get_default_dtype())
    except Exception as error:
        if torch_compat.starts_over(error):
            raise
        # The error may be temporary, so it is not kept.
        return f"it raised {described(error)}"


@functools.lru_cache(maxsize=256)
def _dtypes_of(
    proposed: Proposed, form: LinearForm, dtypes: tuple[tuple[str, torch.dtype], ...], grouped: bool, _: torch.dtype
) -> tuple[str, str] | str:
    length = 1 if form.recurrence == "ssd" and form.chunk == 1 else 3
    sizes = DrawSizes(batch=2, length=length, heads_k=2 if grouped else 4, heads_v=4, dim_k=5, dim_v=7, sort=SORTS[0])
    shapes = shapes_of(form, sizes)
    with substitution.outside_compilation(), torch.no_grad():
        out, last = proposed.run(
            form, [torch.full(shapes[role], 0.5, dtype=dtype, device="cpu") for role, dtype in dtypes]
        )
    v, state = shapes["x" if form.recurrence == "ssd" else "v"], shapes["state"]
    if (
        not isinstance(out, Tensor)
        or not isinstance(last, Tensor)
        or (tuple(out.shape), tuple(last.shape)) != (v, state)
    ):
        return "what it gives has other shapes than the recurrence"
    return str(out.dtype).removeprefix("torch."), str(last.dtype).removeprefix("torch.")


def shapes_of(form: LinearForm, at: DrawSizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the operands by their roles."""
    tokens, number = (at.batch, at.length), (at.heads_v,)
    keys, heads = (*tokens, at.heads_k, at.dim_k), (*tokens, at.heads_v)
    if form.recurrence == "ssd":
        state = (at.batch, at.heads_v, at.dim_v, at.dim_k)
        named = {"x": (*heads, at.dim_v), "dt": heads, "A": number, "B": keys, "C": keys, "D": number}
        return {**named, "dt_bias": number, "state": state}
    decay = (*heads, at.dim_k) if form.channel else heads
    state = (at.batch, at.heads_v, at.dim_k, at.dim_v)
    return {"q": keys, "k": keys, "v": (*heads, at.dim_v), "g": decay, "beta": heads, "state": state}
