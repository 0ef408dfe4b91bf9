"""Halos and decoding by slots where ranks are GPUs: what they give, and how long it takes beside gathering all keys.

torchrun --nproc-per-node 2 -m tests.context_parallel.on_gpus            # one JSON line a case, by rank 0
torchrun --nproc-per-node 2 -m tests.context_parallel.on_gpus --small    # without times, on CPUs if there are no GPUs

Errors are relative, in norm, against one process in float32 (float64 on CPUs), beside that of one process in the ranks' dtype.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

import attn_compiler
from attn_compiler import ContextParallel
from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.passes.context_parallel import decoding, halo

HEADS, HEADS_KV, WIDTH = 32, 8, 128
ROUNDS, WARM_UP = 20, 5

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float64


def started() -> tuple[DeviceMesh, bool]:
    """All ranks, and whether only small sizes are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small or not ON_GPU
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    if ON_GPU:
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    return mesh, small


def main() -> None:
    mesh, small = started()
    for order in (None, "head_tail"):
        _say("halo", order=order, **_halo_errors(mesh, order))
        for length, window in () if small else ((32768, 1024), (131072, 1024), (131072, 4096)):
            _say("halo", order=order, length=length, window=window, **_halo_times(mesh, order, length, window))
    _say("decode", **_decode_errors(mesh))
    for length in () if small else (32768, 131072, 524288):
        _say("decode", length=length, **_decode_times(mesh, length))
    _say("generate", **_generated(mesh))
    dist.destroy_process_group()


def _say(what: str, **found: Any) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"what": what, **found}) + "\n")
        sys.stdout.flush()


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=DEVICE).to(DTYPE)


def _apart(found: Tensor, exact: Tensor) -> float:
    found, exact = (x.detach().double() for x in (found, exact))
    return float((found - exact).norm() / exact.norm())


def _compiled(function: Callable[..., Any], cp: ContextParallel) -> Callable[..., Any]:
    torch._dynamo.reset()
    attn_compiler.reset()
    made: Callable[..., Any] = torch.compile(
        function, backend="attn_compiler", options={"context_parallel": cp}, fullgraph=True
    )
    return made


def _notes() -> dict[str, list[str]]:
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    return {
        "kernels": sorted({site.decision.lowering for site in sites if site.decision is not None}),
        "notes": sorted({note for site in sites for note in site.notes if note.startswith("context parallel")}),
    }


def _milliseconds(function: Callable[[], Any]) -> float:
    """The median of some rounds, of the slowest rank."""
    times = []
    for at in range(WARM_UP + ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if at >= WARM_UP:
            times.append(begin.elapsed_time(end))
    slowest = torch.tensor(sorted(times)[len(times) // 2], device=DEVICE)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 3)


# ---- halos ---------------------------------------------------------------------------------------------------------------


def _windowed(window: int) -> Callable[..., Tensor]:
    """Of (batch, positions, heads · width) each."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for x in (q, k, v))
        at = torch.arange(q.shape[2], device=q.device)
        apart = at[:, None] - at
        out = scaled_dot_product_attention(q, k, v, attn_mask=(apart >= 0) & (apart < window), enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    return attend


def _inputs(length: int) -> list[Tensor]:
    heads = (HEADS, HEADS_KV, HEADS_KV)
    return [_random(1, length, n * WIDTH, seed=seed) for seed, n in enumerate(heads)]


def _halo_errors(mesh: Any, order: Any) -> dict[str, Any]:
    length, window = 2048 if ON_GPU else 128, 100 if ON_GPU else 9
    cp = ContextParallel(mesh, method="all_gather", load_balance=order)
    layout = Layout(size=cp.size, balanced=cp.is_balanced)
    whole, weight = _inputs(length), _random(1, length, HEADS * WIDTH, seed=9)
    wide = torch.float32 if ON_GPU else torch.float64
    results = []
    for dtype in (wide, DTYPE):
        given = [x.to(dtype).requires_grad_() for x in whole]
        out = _windowed(window)(*given)
        results.append([out, *torch.autograd.grad((out * weight.to(dtype)).sum(), given)])
    own = [layout.part(x, 1, cp.rank).contiguous().requires_grad_() for x in whole]
    out = _compiled(_windowed(window), cp)(*own)
    found = [out, *torch.autograd.grad((out * layout.part(weight, 1, cp.rank)).sum(), own)]
    exact, usual = ([layout.part(x, 1, cp.rank) for x in one] for one in results)
    return {
        "errors": [_apart(x, y) for x, y in zip(found, exact, strict=True)],
        "usual": [_apart(x, y) for x, y in zip(usual, exact, strict=True)],
        **_notes(),
    }


def _halo_times(mesh: Any, order: Any, length: int, window: int) -> dict[str, Any]:
    cp = ContextParallel(mesh, method="all_gather", load_balance=order)
    layout = Layout(size=cp.size, balanced=cp.is_balanced)
    own = [layout.part(x, 1, cp.rank).contiguous().requires_grad_() for x in _inputs(length)]
    times: dict[str, Any] = {}
    for name, patch in (("halo", mock.MagicMock()), ("gathered", mock.patch.object(halo, "found", return_value=None))):
        with patch:
            step = _compiled(_windowed(window), cp)
            out = step(*own)
            grad = torch.ones_like(out)
            times[f"{name}, forward"] = _milliseconds(lambda step=step: step(*own))
            times[f"{name}, forward and backward"] = _milliseconds(
                lambda step=step, grad=grad: torch.autograd.grad(step(*own), own, grad)
            )
            times[name] = _notes()
    return times


# ---- decoding ------------------------------------------------------------------------------------------------------------


def _step(cp: ContextParallel) -> Callable[..., Tensor]:
    """One query over what is filled: start: its position."""

    def attend(q: Tensor, kept_k: Tensor, kept_v: Tensor, start: Tensor) -> Tensor:
        k, v = (torch_collectives.keys_of_slots(x, cp.size, cp.group_name) for x in (kept_k, kept_v))
        mask = torch.arange(k.shape[2], device=k.device) <= start
        return scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None, None], enable_gqa=True)

    return attend


def _cache(cp: ContextParallel, length: int, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """What all have, and what this rank keeps: q, k and v."""
    shapes = ((HEADS, 1), (HEADS_KV, length), (HEADS_KV, length))
    q, *whole = (_random(rows, *shape, WIDTH, seed=seed) for seed, shape in enumerate(shapes))
    return [q, *whole], [q, *(x[:, :, cp.rank :: cp.size].contiguous() for x in whole)]


@torch.no_grad()
def _decode_errors(mesh: Any) -> dict[str, Any]:
    cp, length = ContextParallel(mesh), 1024
    (q, k, v), own = _cache(cp, length, 2)
    errors, usual = [], []
    step = _compiled(_step(cp), cp)
    for at in (0, 1, 777, length - 1):
        wide = torch.float32 if ON_GPU else torch.float64
        results = [
            scaled_dot_product_attention(*(x[:, :, : at + 1].to(dtype) for x in (q, k, v)), enable_gqa=True)
            for dtype in (wide, DTYPE)
        ]
        errors.append(_apart(step(*own, torch.tensor(at, device=DEVICE)), results[0]))
        usual.append(_apart(results[1], results[0]))
    return {"errors": errors, "usual": usual, **_notes()}


@torch.no_grad()
def _decode_times(mesh: Any, length: int) -> dict[str, Any]:
    """One layer of one step; the whole of the cache is filled."""
    cp = ContextParallel(mesh)
    whole, own = _cache(cp, length, 1)
    start = torch.tensor(length - 1, device=DEVICE)
    times: dict[str, Any] = {}
    gathering = mock.patch.object(decoding, "why_not", return_value="it is timed")
    for name, patch in (("slots", mock.MagicMock()), ("gathered", gathering)):
        with patch:
            step = _compiled(_step(cp), cp)
            times[name] = _milliseconds(lambda step=step: step(*own, start))
            times[f"{name}, how"] = _notes()

    def alone(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
        mask = torch.arange(k.shape[2], device=k.device) <= start
        return scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None, None], enable_gqa=True)

    torch._dynamo.reset()
    attn_compiler.reset()
    one = torch.compile(alone, backend="attn_compiler", fullgraph=True)
    times["one GPU"] = _milliseconds(lambda: one(*whole, start))
    return times


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _generated(mesh: Any) -> dict[str, Any]:
    """A Llama with a shared cache, compiled, beside the same with a cache of transformers, not compiled: logits of each step."""
    from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

    from attn_compiler.integrations.transformers_cache import ShardedCache

    torch._dynamo.reset()
    attn_compiler.reset()
    cp, new = ContextParallel(mesh), 8
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with _default_dtype(torch.float32 if ON_GPU else torch.float64):
        model = LlamaForCausalLM(config).eval().to(DEVICE, DTYPE)
    ids = torch.randint(1, 512, (2, 33), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    told = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    given = {"input_ids": ids, "attention_mask": mask}
    expected = model.generate(**given, **told, disable_compile=True)
    how = CompileConfig(backend="attn_compiler", mode=None, fullgraph=True, options={"context_parallel": cp})
    how._compile_all_devices = True
    found = model.generate(
        **given, **told, compile_config=how, past_key_values=ShardedCache(config, cp, max_cache_len=ids.shape[1] + new)
    )
    return {
        "same tokens": bool((found.sequences == expected.sequences).all()),
        "errors": [_apart(a, b) for a, b in zip(found.logits, expected.logits, strict=True)],
        **_notes(),
    }


if __name__ == "__main__":
    main()
