"""Attention of other libraries for the cases of bench_peers.py, as their users call it, and ours beside it.

What a library wants to know of a mask before it runs (cuDNN's plan, FlexAttention's block mask, packed rows and their bounds, a dense
mask) is made here, outside of what is timed. A library that has no argument for what a case has raises ValueError.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.hopper.call import backward_of
from attn_compiler.spec.target import Target
from benchmarks import bench_select, kernel_cases, kernel_peers
from benchmarks.kernel_cases import Case, Problem
from benchmarks.kernel_peers import Side


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A side. taken: of (B, H, S, D), in the form in which it reads it; whole: of what it gives, (B, H, S, D). pairs: allowed ones that
    it computes, of one head. note: what a reader of its row has to know. plan: makes once more what it has to know of the mask."""

    side: Side
    pairs: int
    taken: Callable[[Tensor], Tensor] = _same
    whole: Callable[[Tensor], Tensor] = _same
    note: str = ""
    plan: Callable[[], Any] | None = None


MakePeer = Callable[[Problem], Peer]


# ---- masks --------------------------------------------------------------------------------------------------------


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


def counted_queries(case: Case) -> Tensor:
    """bool (B, S): no padding, and with a key. What others get is nobody's."""
    return real_queries(case) & kernel_cases.used_queries(case)[:, 0, :, 0]


def packed_lengths(case: Case) -> list[int]:
    """How long the rows are that follow each other when the real tokens are packed: documents, or rows without padding."""
    if case.documents is not None:
        ids = kernel_cases.document_ids(case)
        return [int(n) for row in ids for n in torch.unique_consecutive(row, return_counts=True)[1]]
    first, end = kernel_cases.key_bounds(case)
    return [int(n) for n in end - first]


def pairs_of_real(case: Case) -> int:
    """Allowed pairs of the queries that are no padding, of one head."""
    first, end = kernel_cases.intervals(case)
    return int(((end - first).clamp(min=0) * real_queries(case)).sum())


# ---- sides --------------------------------------------------------------------------------------------------------


def ours(name: str) -> MakePeer:
    """A lowering of ours."""

    def make(problem: Problem) -> Peer:
        target, lowering = Target.current(str(problem.q.device)), by_name(name)
        refused = [*lowering.why_not(problem.spec, target), *lowering.cannot_build(problem.spec, target)]
        if refused:
            raise ValueError("; ".join(map(str, refused)))
        note = f"backward: {backward_of(problem.spec, target)}" if name == "hopper" and problem.training else ""
        return Peer(side=bench_select.lowering(name)(problem), pairs=problem.case.pairs, note=note)

    return make


def fa4(problem: Problem) -> Peer:
    """FlashAttention-4. Padding and documents by its function for packed rows, which are packed beforehand."""
    flash = importlib.import_module("flash_attn.cute")
    case = problem.case
    window = (None, None) if case.window is None else (case.window - 1, 0)
    further: dict[str, Any] = {
        "softmax_scale": problem.spec.score.scale,
        "causal": case.causal and case.window is None,
        "window_size": window,
        "softcap": case.softcap or 0.0,
    }
    learned = []
    if case.sinks:
        learned = [problem.given["sinks"].detach().requires_grad_(problem.training)]
        further["learnable_sink"] = learned[0]
    if case.padding is not None or case.documents is not None:
        return _packed(problem, flash.flash_attn_varlen_func, further)
    q, k, v = _leaves(problem)

    def call() -> Tensor:
        found = flash.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **further)
        return _first(found).transpose(1, 2)

    return Peer(side=Side(call=call, leaves=[q, k, v, *learned]), pairs=case.pairs)


def _packed(problem: Problem, function: Callable[..., Any], further: Mapping[str, Any]) -> Peer:
    case, device = problem.case, problem.q.device
    real, lengths = real_queries(case).to(device), packed_lengths(case)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def taken(x: Tensor) -> Tensor:
        return x.transpose(1, 2)[real]

    def whole(x: Tensor) -> Tensor:
        found = x.new_zeros(*real.shape, *x.shape[1:])
        found[real] = x
        return found.transpose(1, 2)

    leaves = [taken(x).detach().requires_grad_(problem.training) for x in (problem.q, problem.k, problem.v)]
    sizes = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return Peer(
        side=Side(call=lambda: _first(function(*leaves, **sizes, **further)), leaves=leaves),
        pairs=pairs_of_real(case),
        taken=taken,
        whole=whole,
        note="packed beforehand" if case.documents is not None else "packed beforehand, without padding",
    )


def cudnn_flex(problem: Problem) -> Peer:
    """`cudnn.flex_attention` of cuDNN's frontend: kernels in CuTe-DSL for a plan of every query's intervals of keys."""
    _only_masks(problem.case, "cudnn.flex_attention")
    flex = importlib.import_module("cudnn.flex_attention")
    q, k, v = _leaves(problem)
    bounds = endpoints(problem.case).to(q.device)
    scale = problem.spec.score.scale

    def plan() -> Any:
        given = [x.detach().transpose(1, 2) for x in (q, k, v)]
        return flex.create_mask_plan(bounds, *given, build_backward=problem.training)

    made = plan()

    def call() -> Tensor:
        given = [x.transpose(1, 2) for x in (q, k, v)]
        out: Tensor = flex.flex_attn_func(*given, mask_plan=made, softmax_scale=scale).transpose(1, 2)
        return out

    return Peer(side=Side(call=call, leaves=[q, k, v]), pairs=problem.case.pairs, plan=plan)


def flex(problem: Problem) -> Peer:
    """PyTorch's FlexAttention, compiled; on a CPU as it is, without a backward."""
    side = kernel_peers.flex(problem, compiled=problem.q.is_cuda)
    note = "sinks: out times a share of its lse" if problem.case.sinks else ""
    plan = None if kernel_peers.block_mask(problem) is None else lambda: kernel_peers.block_mask(problem)
    return Peer(side=side, pairs=problem.case.pairs, note=note, plan=plan)


def sdpa_cudnn(problem: Problem) -> Peer:
    """PyTorch's scaled_dot_product_attention with cuDNN's kernel alone; masks are dense."""
    _only_masks(problem.case, "scaled_dot_product_attention")
    is_dense = kernel_peers.dense_bias(problem) is not None
    side = kernel_peers.sdpa(problem, SDPBackend.CUDNN_ATTENTION)
    return Peer(side=side, pairs=problem.case.pairs, note="a dense mask" if is_dense else "")


def _leaves(problem: Problem) -> list[Tensor]:
    return [x.detach().requires_grad_(problem.training) for x in (problem.q, problem.k, problem.v)]


def _first(found: Any) -> Tensor:
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def _only_masks(case: Case, name: str) -> None:
    if case.softcap is not None or case.sinks:
        raise ValueError(f"{name} has no argument for {'a softcap' if case.softcap is not None else 'sinks'}")


#: those of which most is to be learnt first
PEERS: Mapping[str, MakePeer] = {
    "hopper": ours("hopper"),
    "triton": ours("triton"),
    "fa4": fa4,
    "cudnn_flex": cudnn_flex,
    "sdpa_cudnn": sdpa_cudnn,
    "flex": flex,
}


# ---- what is right ------------------------------------------------------------------------------------------------

#: a part of a problem: a row of the batch and a head of k and v
Part = tuple[int, int]


def parts_of(case: Case) -> list[Part]:
    """The first and the last."""
    return list(dict.fromkeys([(0, 0), (case.batch - 1, case.heads_kv - 1)]))


def reference(problem: Problem, grad_out: Tensor, part: Part) -> dict[str, Tensor]:
    """out and the gradients of q, k and v in float64 by definition, of a part: q's heads are those that read its head of k and v."""
    case, (row, head) = problem.case, part
    group = case.heads_q // case.heads_kv
    k, v = (x[row, head].detach().double().requires_grad_() for x in (problem.k, problem.v))
    masks = kernel_peers.allowed(problem)
    mask = masks[row if len(masks) > 1 else 0, 0]
    found: dict[str, list[Tensor]] = {"out": [], "q": []}
    for i in range(head * group, (head + 1) * group):
        q = problem.q[row, i].detach().double().requires_grad_()
        scores = q @ k.T * problem.spec.score.scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if case.sinks:
            sink = problem.given["sinks"][i].detach().double().expand(case.seqlen, 1)
            scores = torch.cat([scores, sink], 1)
        out = scores.softmax(1)[:, : case.seqlen] @ v
        out.backward(grad_out[row, i].double())
        assert q.grad is not None
        found["out"].append(out.detach())
        found["q"].append(q.grad)
        del scores, out
    assert k.grad is not None
    assert v.grad is not None
    return {name: torch.stack(values) for name, values in found.items()} | {"k": k.grad, "v": v.grad}


def distance(found: Tensor, right: Tensor, counted: Tensor | None = None) -> float:
    """The norm of the difference over that of what is right; inf if it is no number. counted: that alone."""
    difference, size = found.double() - right.double(), right.double()
    if counted is not None:
        difference, size = difference.where(counted, 0.0), size.where(counted, 0.0)
    share = float(difference.norm() / size.norm())
    return share if share == share else float("inf")
