"""Propose functions of linear attention (looking.py finds them), and have Dynamo take each call as one node.

Dynamo traces the substitute in place of the function. It makes `linear_call` of the operands, and returns what the function returns.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_call import linear_call
from attn_compiler.passes.matching.linear.looking import template_of
from attn_compiler.passes.matching.linear.templates import Template
from attn_compiler.torch_private import substitution
from attn_compiler.torch_private.substitution import Decided

if TYPE_CHECKING:
    from attn_compiler.passes.matching.linear.running import Proposed

#: the functions found so far; a template until a call is traced, since most processes call none of them
_PROPOSED: dict[types.FunctionType, Proposed | Template] = {}


def current(function: types.FunctionType) -> Proposed:
    """Return a proposed function with its text and everything that it reads at this moment."""
    known = _PROPOSED[function]
    if isinstance(known, Template):
        known = _PROPOSED[function] = _proposed(function, known)
    if known.text.holds():
        return known
    known = _PROPOSED[function] = _proposed(function, known.template)
    return known


def propose(function: types.FunctionType) -> None:
    """Have a function's calls taken, if it has the parameters of a template."""
    template = template_of(function)
    if template is not None and function not in _PROPOSED:
        _PROPOSED[function] = template
        _substitute(function, template)


def proposal(function: types.FunctionType) -> Proposed | None:
    """Propose a function by its parameters and its text; None if it fits no template."""
    template = template_of(function)
    return None if template is None else _proposed(function, template)


def _proposed(function: types.FunctionType, template: Template) -> Proposed:
    # Imported at the first call: most processes that have such functions call none.
    from attn_compiler.passes.matching.linear import source
    from attn_compiler.passes.matching.linear.running import Proposed

    read = source.read(function)
    code = function.__code__
    return Proposed(
        name=f"{function.__module__}:{function.__qualname__}#{read.digest}",
        own=function,
        template=template,
        text=read,
        source=f"{code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{code.co_firstlineno}",
    )


def _substitute(function: types.FunctionType, template: Template) -> None:
    flag = template.state_flag
    others = (*template.settings, *((flag,) if flag is not None else ()), *template.fixed)
    # Dynamo understands pairs and strings in a traced function's closure, but no Template.
    roles = tuple(template.operands.items())
    gives_one_token = template.gives == "out, writes"
    gives_out_alone = template.gives == "out or pair"

    def decide(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> Decided:
        found = _by_role(roles, tensors)
        if any(rest.get(name) is not value for name, value in template.fixed.items()):
            return Decided()
        if gives_one_token and not _is_of_heads(found):
            return Decided()
        by_role = _of_one_token(found) if gives_one_token else found
        from attn_compiler.passes.matching.linear import deciding

        name, operands = function.__name__, list(by_role.values())
        decided = deciding.decide(name, lambda: current(function), operands, tuple(by_role), rest)
        return Decided() if decided is None else Decided(text=decided[0], rests_on=decided[1].text.reads)

    def taken(tensors: Mapping[str, Tensor], rest: Mapping[str, Any], said: str) -> Any:
        found = _by_role(roles, tensors)
        if gives_one_token:
            out, last = linear_call(list(_of_one_token(found).values()), said)
            found["state"].copy_(last)
            return out.squeeze(1)
        out, last = linear_call(list(found.values()), said)
        is_asked = flag is not None and rest[flag]
        if gives_out_alone:
            return (out, last) if is_asked else out
        return out, (last if is_asked else None)

    substitution.substitute(function, tuple(template.operands.values()), others, decide, taken)


def _by_role(roles: tuple[tuple[str, str], ...], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {role: tensors[name] for role, name in roles if name in tensors}


#: ranks of the operands of a one-token function
_RANKS = {"x": 3, "dt": 3, "A": 3, "B": 3, "C": 3, "D": 2, "dt_bias": 2, "state": 4}


def _is_of_heads(found: Mapping[str, Tensor]) -> bool:
    """Return whether each value spread over a head's channels is one number for each head."""
    if "A" not in found or any(x.dim() != _RANKS[role] for role, x in found.items()):
        return False
    spread = [found[role] for role in ("dt", "A", "D", "dt_bias") if role in found]
    return all(x.stride(-1) == 0 for x in spread) and found["A"].stride(1) == 0


def _of_one_token(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the operands in the layout of `linear_call`."""
    made = {
        "x": found["x"].unsqueeze(1),
        "dt": found["dt"][:, :, 0].unsqueeze(1),
        "A": found["A"][:, 0, 0],
        "B": found["B"].unsqueeze(1),
        "C": found["C"].unsqueeze(1),
    }
    for role in ("D", "dt_bias"):
        if role in found:
            made[role] = found[role][:, 0]
    made["state"] = found["state"]
    return made
