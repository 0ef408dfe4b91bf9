"""Other kernels for the cases of kernel_cases.py, and ours in the same form.

Masks, block masks and dense biases are made outside of what is timed. PyTorch's own kernels get masks as additive tensors in the dtype of
q, which is what they read; queries without any allowed key may use all there, since not every kernel is defined for none.
"""

from __future__ import annotations

import importlib
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


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation of a problem. call: out, (B, Hq, S, Dv). leaves: what it is differentiated by, q, k and v first.

    taken: of (B, H, S, D), in the form in which it reads it, where that is another; whole: of what it gives, (B, H, S, D).
    """

    call: Callable[[], Tensor]
    leaves: list[Tensor]
    taken: Callable[[Tensor], Tensor] = _same
    whole: Callable[[Tensor], Tensor] = _same


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


def fa4(problem: Problem) -> Side:
    """FlashAttention-4. Padding and documents by its function for packed rows, which are packed beforehand."""
    flash = importlib.import_module("flash_attn.cute")
    case = problem.case
    further: dict[str, Any] = {
        "softmax_scale": problem.spec.score.scale,
        "causal": case.causal and case.window is None,
        "window_size": (None, None) if case.window is None else (case.window - 1, 0),
        "softcap": case.softcap or 0.0,
    }
    learned = []
    if case.sinks:
        learned = [problem.given["sinks"].detach().requires_grad_(problem.training)]
        further["learnable_sink"] = learned[0]
    if case.padding is not None or case.documents is not None:
        return _packed(problem, flash.flash_attn_varlen_func, further)
    q, k, v = _inputs(problem)

    def call() -> Tensor:
        return _first(flash.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **further)).transpose(1, 2)

    return Side(call=call, leaves=[q, k, v, *learned])


def _packed(problem: Problem, function: Callable[..., Any], further: Mapping[str, Any]) -> Side:
    device = problem.q.device
    real, lengths = real_queries(problem.case).to(device), packed_lengths(problem.case)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def taken(x: Tensor) -> Tensor:
        return x.transpose(1, 2)[real]

    def whole(x: Tensor) -> Tensor:
        found = x.new_zeros(*real.shape, *x.shape[1:])
        found[real] = x
        return found.transpose(1, 2)

    leaves = [taken(x).detach().requires_grad_(problem.training) for x in (problem.q, problem.k, problem.v)]
    sizes = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return Side(call=lambda: _first(function(*leaves, **sizes, **further)), leaves=leaves, taken=taken, whole=whole)


def cudnn_flex(problem: Problem) -> Side:
    """`cudnn.flex_attention` of cuDNN's frontend: kernels in CuTe-DSL for a plan of each query's keys, made before."""
    if problem.case.softcap is not None or problem.case.sinks:
        raise ValueError("cudnn.flex_attention has no argument for a softcap or sinks")
    library = importlib.import_module("cudnn.flex_attention")
    leaves = _inputs(problem)
    given = [x.detach().transpose(1, 2) for x in leaves]
    plan = library.create_mask_plan(
        endpoints(problem.case).to(leaves[0].device), *given, build_backward=problem.training
    )
    further = {"mask_plan": plan, "softmax_scale": problem.spec.score.scale}

    def call() -> Tensor:
        out: Tensor = library.flex_attn_func(*(x.transpose(1, 2) for x in leaves), **further).transpose(1, 2)
        return out

    return Side(call=call, leaves=list(leaves))


def _first(found: Any) -> Tensor:
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def endpoints(case: Case) -> Tensor:
    """int32 (1, n, B * S): the keys of each query as cuDNN's frontend has them, [0, F0) and [F1, F2). n is 1 where all begin at 0."""
    first, end = kernel_cases.intervals(case)
    end = end.clamp(min=0)
    first = torch.minimum(first.clamp(min=0), end)
    rows = [end] if not first.any() else [torch.zeros_like(end), first, end]
    return torch.stack([row.flatten() for row in rows])[None].int().contiguous()


def real_queries(case: Case) -> Tensor:
    """bool (B, S): no padding."""
    first, end = kernel_cases.key_bounds(case)
    at = torch.arange(case.seqlen)
    return (at >= first[:, None]) & (at < end[:, None])


def packed_lengths(case: Case) -> list[int]:
    """How long the rows are that follow each other when the real tokens are packed: documents, or rows without padding."""
    if case.documents is not None:
        ids = kernel_cases.document_ids(case)
        return [int(n) for row in ids for n in torch.unique_consecutive(row, return_counts=True)[1]]
    first, end = kernel_cases.key_bounds(case)
    return [int(n) for n in end - first]


#: those that are measured where they are asked for
LIBRARIES: Mapping[str, Make] = {"fa4": fa4, "cudnn_flex": cudnn_flex}
PEERS: Mapping[str, Make] = {
    "cudnn": lambda problem: sdpa(problem, SDPBackend.CUDNN_ATTENTION),
    "flash": lambda problem: sdpa(problem, SDPBackend.FLASH_ATTENTION),
    "efficient": lambda problem: sdpa(problem, SDPBackend.EFFICIENT_ATTENTION),
    "flex": flex,
    **LIBRARIES,
}
