"""Other kernels for the cases of kernel_cases.py, and ours in the same form.

Masks, block masks and dense biases are made outside of what is timed. PyTorch's own kernels get masks as additive tensors in the
dtype of q, which is what they read; queries without any allowed key may use all there, since not every kernel is defined for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import kernel_cases
from benchmarks.kernel_cases import Case, Problem


@dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation of a problem. call: out, (B, Hq, S, Dv). leaves: what it is differentiated by, q, k and v first."""

    call: Callable[[], Tensor]
    leaves: list[Tensor]


Make = Callable[[Problem], Side]


def ours(problem: Problem) -> Side:
    """`attn_compiler::triton`"""
    q, k, v = _inputs(problem)
    operands, text = problem.operands, problem.text
    learned = [problem.named[name] for name in problem.plan.differentiable]
    return Side(
        call=lambda: torch.ops.attn_compiler.triton.default(q, k, v, operands, text)[0], leaves=[q, k, v, *learned]
    )


def _inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves of its own for every side, in the same memory."""
    q, k, v = (x.detach().requires_grad_(problem.training) for x in (problem.q, problem.k, problem.v))
    return q, k, v


# ---- PyTorch's own ------------------------------------------------------------------------------------------------


def sdpa(problem: Problem, backend: SDPBackend) -> Side:
    """scaled_dot_product_attention with one kernel alone. Raises RuntimeError in its call where that does not take the problem."""
    case = problem.case
    q, k, v = _inputs(problem)
    bias = dense_bias(problem)
    further: dict[str, Any] = {"attn_mask": bias} if bias is not None else {"is_causal": case.causal}
    if case.heads_q != case.heads_kv:
        further["enable_gqa"] = True

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, scale=problem.spec.score.scale, **further)

    return Side(call=call, leaves=[q, k, v, *([bias] if bias is not None and bias.requires_grad else [])])


def dense_bias(problem: Problem) -> Tensor | None:
    """(B|1, Hq|1, S, S) in the dtype of q: what is added to the scores, masks included; None if a causal flag says it all.

    A leaf with gradient where it is learned.
    """
    case, given, dtype = problem.case, problem.given, problem.q.dtype
    masks = case.padding is not None or case.window is not None or case.documents is not None
    if not masks and not (case.bias or case.alibi or case.table):
        return None
    if case.bias:
        found = given["bias"]
    elif case.table or case.alibi:
        found = _by_distance(case, given).to(dtype)
    else:
        found = torch.zeros((), dtype=dtype, device=problem.q.device)
    if masks or case.causal:
        found = torch.where(allowed(problem), found, -torch.inf)
    return found.detach().requires_grad_(problem.training and (case.bias or case.table))


def _by_distance(case: Case, given: Mapping[str, Tensor]) -> Tensor:
    """(1, Hq, S, S)"""
    name = "table" if case.table else "slopes"
    at = torch.arange(case.seqlen, device=given[name].device)
    distance = at - at[:, None]
    if case.table:
        return given["table"][distance + case.seqlen - 1].permute(2, 0, 1)[None].contiguous()
    return (given["slopes"][:, None, None] * distance)[None]


def allowed(problem: Problem) -> Tensor:
    """bool (B|1, 1, S, S); everything for a query without any allowed key."""
    device = problem.q.device
    keys = torch.arange(problem.case.seqlen, device=device)
    first, end = (bound.to(device) for bound in kernel_cases.intervals(problem.case))
    if problem.case.padding is None:
        first, end = first[:1], end[:1]
    found = (keys >= first[..., None]) & (keys < end[..., None])
    return (found | (end <= first)[..., None])[:, None]


# ---- FlexAttention ------------------------------------------------------------------------------------------------


def flex(problem: Problem, *, compiled: bool = True) -> Side:
    """flex_attention with a block mask. Sinks, which it has not, rescale its output by its lse, as models do."""
    case = problem.case
    q, k, v = _inputs(problem)
    learned: dict[str, Tensor] = {
        name: problem.given[name].detach().requires_grad_(problem.training)
        for name in ("bias", "table", "sinks")
        if name in problem.given
    }
    further: dict[str, Any] = {
        "score_mod": _score_mod(case, {**problem.given, **learned}),
        "block_mask": block_mask(problem),
        "scale": problem.spec.score.scale,
        "enable_gqa": case.heads_q != case.heads_kv,
    }
    run = torch.compile(_flex, dynamic=False) if compiled else _flex
    return Side(call=lambda: run(q, k, v, learned.get("sinks"), **further), leaves=[q, k, v, *learned.values()])


def _flex(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **further: Any) -> Tensor:
    if sinks is None:
        plain: Tensor = flex_attention(q, k, v, **further)
        return plain
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **further)
    share = torch.sigmoid(aux.lse - sinks.float()[None, :, None])
    scaled: Tensor = (out * share[..., None]).to(out.dtype)
    return scaled


def _score_mod(case: Case, given: Mapping[str, Tensor]) -> Callable[..., Tensor] | None:
    if case.softcap is not None:
        cap = case.softcap
        return lambda score, b, h, q, k: cap * torch.tanh(score / cap)
    if case.alibi:
        slopes = given["slopes"]
        return lambda score, b, h, q, k: score + slopes[h] * (k - q)
    if case.table:
        table, last = given["table"], case.seqlen - 1
        return lambda score, b, h, q, k: score + table[k - q + last, h]
    if case.bias:
        bias = given["bias"]
        return lambda score, b, h, q, k: score + bias[0, h, q, k]
    return None


def block_mask(problem: Problem) -> Any:
    """FlexAttention's, made anew; None where nothing is masked."""
    case, device = problem.case, problem.q.device
    conditions: list[Callable[..., Any]] = []
    if case.causal:
        conditions.append(lambda b, h, q, k: k <= q)
    if case.window is not None:
        window = case.window
        conditions.append(lambda b, h, q, k: q - k < window)
    if case.padding is not None:
        first, end = (bound.to(device) for bound in kernel_cases.key_bounds(case))
        conditions.append(lambda b, h, q, k: (k >= first[b]) & (k < end[b]))
    if case.documents is not None:
        ids = problem.given["ids"]
        conditions.append(lambda b, h, q, k: ids[b, q] == ids[b, k])
    if not conditions:
        return None
    batch = case.batch if case.padding is not None or case.documents is not None else None
    return create_block_mask(and_masks(*conditions), batch, None, case.seqlen, case.seqlen, device=str(device))


PEERS: Mapping[str, Make] = {
    "cudnn": lambda problem: sdpa(problem, SDPBackend.CUDNN_ATTENTION),
    "flash": lambda problem: sdpa(problem, SDPBackend.FLASH_ATTENTION),
    "efficient": lambda problem: sdpa(problem, SDPBackend.EFFICIENT_ATTENTION),
    "flex": flex,
}
