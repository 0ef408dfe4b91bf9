"""What collectives, sends and receives leave in masks that compiled code made, on each of two ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from attn_compiler.torch_private import known_masks

S = 8

Write = Callable[[Tensor], Any]


def _recv(x: Tensor) -> None:
    if dist.get_rank():
        dist.recv(x, src=0)
    else:
        dist.send(x, dst=1)


def _irecv(x: Tensor) -> None:
    (dist.irecv(x, src=0) if dist.get_rank() else dist.isend(x, dst=1)).wait()


def _batch(x: Tensor) -> None:
    op = dist.P2POp(dist.irecv, x, 0) if dist.get_rank() else dist.P2POp(dist.isend, x, 1)
    for work in dist.batch_isend_irecv([op]):
        work.wait()


def _scatter(x: Tensor) -> None:
    dist.scatter(x, None if dist.get_rank() else [x.clone(), x.clone()], src=0)


def _gather(x: Tensor) -> None:
    """Into the mask of rank 0 comes that of rank 1."""
    dist.gather(x.clone(), None if dist.get_rank() else [torch.empty_like(x), x], dst=0)


def _all_gather(x: Tensor) -> None:
    dist.all_gather([x, torch.empty_like(x)], x.clone())


def _all_gather_into(x: Tensor) -> None:
    half = x[: S // 2].clone().logical_not()
    dist.all_gather_into_tensor(x, half)


def _all_to_all(x: Tensor) -> None:
    """gloo's list form is missing: parts of one tensor, each of which goes to another rank."""
    dist.all_to_all_single(x, x.clone())


def _coalesced(x: Tensor) -> None:
    dist._broadcast_coalesced(dist.group.WORLD, [x], 1 << 20, 0)


def _buffer(x: Tensor) -> None:
    """DistributedDataParallel sends the buffers of rank 0 to all, before a forward."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", x)
    nn.parallel.DistributedDataParallel(model)(torch.ones(1, 2))


def _in_thread(x: Tensor) -> None:
    thread = threading.Thread(target=dist.broadcast, args=(x, 0))
    thread.start()
    thread.join()


def _later(x: Tensor) -> None:
    dist.broadcast(x, 0, async_op=True).wait()


WRITES: dict[str, Write] = {
    "broadcast": lambda x: dist.broadcast(x, 0),
    "broadcast, waited for later": _later,
    "broadcast, of a view": lambda x: dist.broadcast(x[2:], 0),
    "broadcast, of the data": lambda x: dist.broadcast(x.data, 0),
    "broadcast, by another thread": _in_thread,
    "broadcasts, joined": _coalesced,
    "all-reduce": lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
    "reduce": lambda x: dist.reduce(x, 1, dist.ReduceOp.MAX),
    "receive": _recv,
    "receive, waited for later": _irecv,
    "receives, joined": _batch,
    "scatter": _scatter,
    "gather": _gather,
    "all-gather": _all_gather,
    "all-gather into it": _all_gather_into,
    "all-to-all": _all_to_all,
    "a buffer of DDP": _buffer,
}


#: of these, what is tried in compiled code, too
WHOLE = ("broadcast", "all-reduce", "receive")


def _causal(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[2])
    return at[:, None] >= at


def _window(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[2])
    return (at[:, None] - at).abs() < 3


def _attend(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).nan_to_num()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """off: the largest difference from eager, before and after the write. is_changed: whether that made the mask another one. was_known,
    is_known: whether its meaning was known before and after."""

    off: float
    is_changed: bool
    was_known: bool
    is_known: bool


def outcomes() -> dict[str, Outcome]:
    """By how the mask was written, outside of compiled code."""
    torch._dynamo.reset()
    make = _compiled(_causal if dist.get_rank() else _window)
    attend = _compiled(_attend)
    x, found = _numbers(), {}
    for name, write in WRITES.items():
        mask = make(x)
        was_known, before = known_masks.recall(mask) is not None, mask.clone()
        off = [_off(attend(x, mask), _attend(x, before))]
        write(mask)
        off.append(_off(attend(x, mask), _attend(x, mask.clone())))
        found[name] = Outcome(
            off=max(off),
            is_changed=not torch.equal(mask, before),
            was_known=was_known,
            is_known=known_masks.recall(mask) is not None,
        )
    return found


def in_one_function() -> dict[str, float]:
    """The differences from eager where the mask is made, written and used in one function that is compiled."""
    return {name: _of_function(WRITES[name]) for name in WHOLE}


def _of_function(write: Write) -> float:
    torch._dynamo.reset()
    make = _causal if dist.get_rank() else _window

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = make(x)
        before = _attend(x, mask)
        write(mask)
        return before, _attend(x, mask)

    x = _numbers()
    return max(_off(a, b) for a, b in zip(_compiled(function)(x), function(x), strict=True))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="attn_compiler", options={"inner": "aot_eager"})


def _numbers() -> Tensor:
    return torch.randn(1, 2, S, 4, generator=torch.Generator().manual_seed(0))


def _off(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
