"""What bench_added.py measures: biases, numbers by distance and dense masks, their tensors, other kernels for them, and float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.hopper.plan import GRAD_BLOCKS
from attn_compiler.lowerings.shared import parts, tile_table
from attn_compiler.spec import masks, scores
from attn_compiler.spec.target import Target
from benchmarks import kernel_cases, kernel_peers
from benchmarks.kernel_cases import Case, EagerEmitter, Problem

__all__ = [
    "CASES",
    "AddedCase",
    "Problem",
    "build",
    "cudnn",
    "error",
    "exact",
    "exact_gradients",
    "flex",
    "head_dims",
    "site_of",
]

_TOKENS, _WIDTH = 16384, 2048
#: heads whose numbers are compared with float64
_COMPARED = ((0, 0), (-1, -1))
#: of a mask with holes: pairs that are allowed
_ALLOWED = 0.7
#: queries and keys of a square that is allowed, or not, in a mask of blocks
_SQUARE = 256
#: head dims that a row of a measured one speaks for
_HEAD_DIMS = ((1, 64), (65, 128), (129, 256))


@dataclass(frozen=True, kw_only=True)
class AddedCase(Case):
    """wide: a bias in float32. dense: a mask that is a tensor of the model's, the same for all batch rows: "holes" in every tile, or
    "blocks", which are allowed in full or not at all. forms: other forms of Hopper's kernel are timed, too."""

    wide: bool = False
    dense: Literal["holes", "blocks"] | None = None
    forms: bool = False

    @property
    def element(self) -> int:
        """Bytes of a number that is added. A table in q's dtype is read as such."""
        return 4 if self.wide else 2

    @property
    def has_backward(self) -> bool:
        """Whether one of Hopper's own is timed. It is compared where heads are not grouped."""
        takes = self.dense is not None or (self.bias and not self.wide and not self.causal)
        return takes and self.head_dim <= max(GRAD_BLOCKS) and self.heads_q == self.heads_kv

    @property
    def part(self) -> str:
        """What rows go by."""
        return "bias" if self.bias else "distances" if self.table else "mask"

    @property
    def pairs(self) -> int:
        return super().pairs if self.dense is None else self.batch * int(mask_of(self).sum())


def _case(name: str, *, seqlen: int, head_dim: int, **further: Any) -> AddedCase:
    """16k tokens of width 2048."""
    sizes: dict[str, Any] = {"batch": max(_TOKENS // seqlen, 1), "heads_q": _WIDTH // head_dim, "causal": False}
    sizes |= further
    sizes.setdefault("heads_kv", sizes["heads_q"])
    name = f"{name}_d{head_dim}_s{seqlen}"
    return AddedCase(name=name, seqlen=seqlen, head_dim=head_dim, head_dim_v=head_dim, **sizes)


#: where FlexAttention is asked, too: it is compiled for each, which takes longer than all else
_FLEX: dict[str, Any] = {"seqlen": 2048, "peers": ("flex",)}

#: the most telling first
CASES: tuple[AddedCase, ...] = (
    *(_case("bias", head_dim=d, bias=True, forms=True, **_FLEX) for d in (128, 64)),
    *(_case("t5", head_dim=d, table=True, forms=True, **_FLEX) for d in (128, 64)),
    *(_case("mask_holes", head_dim=d, dense="holes", **_FLEX) for d in (128, 64)),
    _case("bias_causal", head_dim=128, bias=True, causal=True, **_FLEX),
    _case("bias_float32", seqlen=2048, head_dim=128, bias=True, wide=True),
    *(_case("bias", seqlen=8192, head_dim=d, bias=True) for d in (128,)),
    *(_case("mask_blocks", seqlen=2048, head_dim=d, dense="blocks") for d in (128, 64)),
    _case("bias", seqlen=2048, head_dim=256, bias=True),
    *(_case("t5", seqlen=s, head_dim=d, table=True) for d in (128, 64) for s in (512, 8192)),
    *(_case("bias", seqlen=512, head_dim=d, bias=True) for d in (128, 64)),
    *(_case("mask_holes", seqlen=s, head_dim=d, dense="holes") for s in (8192, 512) for d in (128, 64)),
    _case("bias_gqa", seqlen=2048, head_dim=128, bias=True, heads_kv=4),
    _case("bias_causal", seqlen=2048, head_dim=64, bias=True, causal=True),
    _case("t5", seqlen=2048, head_dim=256, table=True),
    _case("mask_holes", seqlen=2048, head_dim=256, dense="holes"),
    _case("bias_float32", seqlen=2048, head_dim=64, bias=True, wide=True),
)


def head_dims(case: AddedCase) -> tuple[int, int]:
    """Those that a row of the case speaks for."""
    return next(each for each in _HEAD_DIMS if each[0] <= case.head_dim <= each[1])


@functools.lru_cache(maxsize=4)
def mask_of(case: AddedCase) -> Tensor:
    """bool (S, S), on the CPU: which pairs are allowed. Each query has its own key."""
    generator = torch.Generator().manual_seed(0)
    size = case.seqlen
    if case.dense == "blocks":
        count = -(-size // _SQUARE)
        squares = torch.rand(count, count, generator=generator) < 0.5
        found = squares.repeat_interleave(_SQUARE, 0).repeat_interleave(_SQUARE, 1)[:size, :size].contiguous()
    else:
        found = torch.rand(size, size, generator=generator) < _ALLOWED
    return found.fill_diagonal_(True)


def build(case: AddedCase, device: str, *, training: bool = False) -> Problem:
    """The tensors of a case, the same ones for every call."""
    problem = kernel_cases.build(case, device=device, dtype=torch.bfloat16, training=training)
    given, spec = dict(problem.given), problem.spec
    if case.dense is not None:
        given["mask"] = mask_of(case).to(device)[None, None]
        dense = masks.Dense(shape=tuple(given["mask"].shape), dtype="bool")
        spec = dataclasses.replace(spec, mask=masks.MaskSpec(dense=dense, reason="it comes in"))
    if case.wide:
        given["bias"] = given["bias"].float()
    if case.bias:
        # In a backward of its own Hopper's kernel takes those that want no gradient.
        dtype = str(given["bias"].dtype).removeprefix("torch.")
        change = scores.DenseBias(shape=tuple(given["bias"].shape), dtype=dtype, requires_grad=False)
        spec = dataclasses.replace(spec, score=dataclasses.replace(spec.score, changes=(change,)))
    tiles = tile_table.tiles(spec, Target.current(device))
    return dataclasses.replace(problem, given=given, spec=spec, plan=parts.of(spec), tiles=tiles)


def site_of(emitter: EagerEmitter, problem: Problem) -> Operands:
    """The nodes that a lowering finds at the site of a case."""
    found = kernel_cases.site_of(emitter, problem.q, problem.k, problem.v, problem.given)
    if problem.spec.mask.dense is None:
        return found
    return dataclasses.replace(found, mask=emitter.given("dense", problem.given["mask"]))


# ---- other kernels ------------------------------------------------------------------------------------------------


def flex(problem: Problem) -> Callable[[], Tensor]:
    """FlexAttention, compiled."""
    mask = problem.given.get("mask")
    if mask is None:
        return kernel_peers.flex(problem).call
    of_pairs, size = mask[0, 0], problem.case.seqlen
    block_mask = create_block_mask(
        lambda b, h, q, k: of_pairs[q, k], None, None, size, size, device=str(problem.q.device)
    )
    run: Any = torch.compile(flex_attention, dynamic=False)
    scale = problem.spec.score.scale
    return lambda: run(problem.q, problem.k, problem.v, block_mask=block_mask, scale=scale)


def cudnn(problem: Problem) -> Callable[[], Tensor]:
    """PyTorch's cuDNN, which gets all of it as a bias in the dtype of q."""
    mask = problem.given.get("mask")
    if mask is None:
        return kernel_peers.sdpa(problem, SDPBackend.CUDNN_ATTENTION).call
    bias = torch.zeros_like(mask, dtype=problem.q.dtype).masked_fill_(~mask, -torch.inf)
    q, k, v = problem.q, problem.k, problem.v

    def call() -> Tensor:
        with torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return call


# ---- float64 ------------------------------------------------------------------------------------------------------


def exact(problem: Problem) -> list[tuple[int, int, Tensor, Tensor]]:
    """Batch row, head, out (S, Dv) and lse (S,) of some heads, in float64."""
    return [(b, h, *_exact(problem, _read(problem, b, h), h)) for b, h in _COMPARED]


def exact_gradients(problem: Problem, grad_out: Tensor) -> list[tuple[int, int, Tensor, Tensor, Tensor]]:
    """Batch row, head, and the gradients of q, k and v of some heads, which are not grouped, in float64."""
    found = []
    for batch, head in _COMPARED:
        leaves = [x.requires_grad_() for x in _read(problem, batch, head)]
        out, _ = _exact(problem, leaves, head)
        grad_q, grad_k, grad_v = torch.autograd.grad(out, leaves, grad_out[batch, head].double())
        found.append((batch, head, grad_q, grad_k, grad_v))
    return found


def _read(problem: Problem, batch: int, head: int) -> list[Tensor]:
    """q, k and v of a head, in float64."""
    kv_head = (head % problem.case.heads_q) // (problem.case.heads_q // problem.case.heads_kv)
    given = (problem.q[batch, head], problem.k[batch, kv_head], problem.v[batch, kv_head])
    return [x.detach().double() for x in given]


def _exact(problem: Problem, read: Sequence[Tensor], head: int) -> tuple[Tensor, Tensor]:
    case, given = problem.case, problem.given
    q, k, v = read
    logits = q @ k.T * problem.spec.score.scale
    at = torch.arange(case.seqlen, device=q.device)
    if case.bias:
        logits = logits + given["bias"][0, head].double()
    if case.table:
        logits = logits + given["table"][at - at[:, None] + case.seqlen - 1, head].double()
    if case.causal:
        logits = logits.masked_fill(at > at[:, None], -torch.inf)
    if "mask" in given:
        logits = logits.masked_fill(~given["mask"][0, 0], -torch.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def error(found: Sequence[Tensor], expected: Sequence[tuple[Any, ...]]) -> float:
    """The norm of the difference, relative to that of what is expected: the largest of all. inf if it is no number."""
    worst = 0.0
    for batch, head, *right in expected:
        for mine, wanted in zip(found, right, strict=False):
            share = float((mine[batch, head].double() - wanted).norm() / wanted.norm())
            worst = max(worst, share if share == share else float("inf"))
    return worst
