"""The rows of the gate: of kernels, decoding, whole models and first steps some of each, our side and a peer in one process.

A row gives a function that times both sides in turn for so many seconds. Making it compiles both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import attn_compiler
from benchmarks import compare, harness, models
from benchmarks.gate_rule import OURS, PEER

Kind = Literal["kernel", "decode", "end to end", "first step"]
#: seconds -> milliseconds of every call of each side
Timing = Callable[[float], Mapping[str, list[float]]]
#: a device -> both sides, ready to be timed there
Make = Callable[[str], Timing]

_SIDES = {PEER: harness.BASELINE, OURS: harness.BACKEND}
#: layers of whole models: all layers look alike
_LAYERS = 2
#: tokens of a sequence, and sequences, on a CPU
_TOKENS, _SEQUENCES = 128, 1
_LEAST_ROUNDS, _MOST_ROUNDS = 15, 2000
#: how long a side is called before it is the other's turn, on a CPU
_TURN_MS = 4.0
_FIRST_STEPS = (6, 12)


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    kind: Kind
    peer: str
    make: Make


def rows(device: str) -> tuple[Row, ...]:
    """Of a machine, in the order in which they are measured."""
    return _ON_CPU if device == "cpu" else _ON_GPU


def in_turn(steps: Mapping[str, harness.Step], device: str) -> Timing:
    """Times steps that are compiled. On a CPU short ones are called several times in a row: sides take turns so often that what else the
    machine does falls on both, and a turn is long enough for its clock."""
    times = {side: _times(step) if device == "cpu" else 1 for side, step in steps.items()}
    called = {side: harness.several(step, times[side]) for side, step in steps.items()}

    def timed(seconds: float) -> Mapping[str, list[float]]:
        found = harness.interleave(
            called, device, seconds=seconds, min_rounds=_LEAST_ROUNDS, max_rounds=_MOST_ROUNDS, clock="process"
        )
        return {side: [ms / times[side] for ms in took] for side, took in found.items()}

    return timed


def _times(step: harness.Step) -> int:
    """How often a step is called in a row."""
    took = []
    for _ in range(5):
        begin = time.process_time()
        step()
        took.append((time.process_time() - begin) * 1e3)
    return max(1, round(_TURN_MS / max(min(took), 1e-3)))


def _end_to_end(family: str, implementation: str, scenario: str) -> Make:
    def make(device: str) -> Timing:
        model, given = model_of(family, implementation, scenario, device)
        training = models.SCENARIOS[scenario].training
        steps = compare.compile_both(compare.Case(model=model, inputs=given, device=device, training=training))
        return in_turn({side: steps[backend] for side, backend in _SIDES.items()}, device)

    return make


def model_of(family: str, implementation: str, scenario: str, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the registry with few layers, and its inputs: on a GPU of the real widths, on a CPU short ones."""
    way, on_gpu = models.SCENARIOS[scenario], device != "cpu"
    dtype, size = (torch.bfloat16, "full") if on_gpu else (torch.float32, "small")
    model = models.build(family, size, implementation, dtype, device)  # type: ignore[arg-type]
    for part in model.modules():
        for name, child in part.named_children():
            if isinstance(child, nn.ModuleList) and len(child) > _LAYERS:
                setattr(part, name, child[:_LAYERS])
    given = models.example_inputs(family, size, way, dtype, device)  # type: ignore[arg-type]
    if not on_gpu:
        short = {name: x[-_SEQUENCES:, :_TOKENS] for name, x in given.items() if isinstance(x, torch.Tensor)}
        given = {**given, **short}
    return model.train(way.training), given


def _first_step(family: str, implementation: str, scenario: str) -> Make:
    """Compiling again and again in one process: CPU seconds of tracing, of the passes and of Inductor. Kernels are found on disk, which
    leaves out the C++ and the Triton compiler."""

    def make(device: str) -> Timing:
        model, given = model_of(family, implementation, scenario, device)
        training = models.SCENARIOS[scenario].training
        for backend in _SIDES.values():
            _compile(model, given, training, backend)

        def timed(seconds: float) -> Mapping[str, list[float]]:
            times: dict[str, list[float]] = {side: [] for side in _SIDES}
            order, deadline = list(_SIDES), time.perf_counter() + seconds
            # Without seconds nothing is to be learnt, but that all is compiled.
            least = _FIRST_STEPS[0] if seconds else 1
            while len(times[OURS]) < _FIRST_STEPS[1]:
                if len(times[OURS]) >= least and time.perf_counter() > deadline:
                    break
                for side in order:
                    begin = time.process_time()
                    _compile(model, given, training, _SIDES[side])
                    times[side].append((time.process_time() - begin) * 1e3)
                order.reverse()
            return times

        return timed

    return make


def _compile(model: nn.Module, given: Mapping[str, Any], training: bool, backend: str) -> None:
    torch.compiler.reset()
    attn_compiler.reset()
    ours = {"cache_rewrites": False} if backend == harness.BACKEND else {}
    # In this process, so that its CPU seconds have all that is done.
    options = {"compile_threads": 1, "fx_graph_cache": False, **ours}
    run: Any = torch.compile(model, backend=backend, dynamic=False, options=options)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        harness.make_step(run, given, training=training)()
    model.zero_grad(set_to_none=True)


def _latent(name: str) -> Make:
    """A decoding step of a model with latent attention."""

    def make(device: str) -> Timing:
        from benchmarks import bench_mla

        torch.compiler.reset()
        cases = {case.name: case for case in (*bench_mla.GPU_CASES, *bench_mla.SMALL_CASES)}
        stepper = bench_mla.Stepper(cases[name], device)
        steps = {side: stepper.compiled(backend) for side, backend in _SIDES.items()}
        for step in steps.values():
            step()
        return in_turn(steps, device)

    return make


def _kernel(lowering: str, peer: str, case: str, which: Literal["forward", "backward"]) -> Make:
    """The kernel of a lowering beside that of another one, or beside "sdpa", PyTorch's choice with the mask as a tensor."""

    def make(device: str) -> Timing:
        from benchmarks import bench_select, kernel_cases, kernel_timing, select_cases

        how: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "training": which == "backward"}
        problem = kernel_cases.build(select_cases.BY_NAME[case], **how)
        grad_out = kernel_timing.gradient_of_out(problem)
        made = {side: bench_select.PEERS.get(name) or bench_select.lowering(name) for side, name in names.items()}
        sides = {
            side: kernel_timing.timed(of_side(problem), which, grad_out, once=True) for side, of_side in made.items()
        }

        def timed(seconds: float) -> Mapping[str, list[float]]:
            found = kernel_timing.interleave(sides, device, seconds)
            return {side: [us / 1e3 for us in times] for side, times in found.items()}

        return timed

    names = {OURS: lowering, PEER: peer}
    return make


def _decode(case: str) -> Make:
    """The decode kernel beside cuDNN over the whole cache, as replays of CUDA graphs."""

    def make(device: str) -> Timing:
        from torch.nn.attention import SDPBackend

        from attn_compiler.lowerings.decode import schedule
        from attn_compiler.spec.target import Target
        from benchmarks import bench_decode, decode_cases, kernel_timing

        problem = decode_cases.build(decode_cases.BY_NAME[case], device)
        ours = bench_decode.ours(problem, schedule.schedule(problem.spec, Target.current(device)))
        peer = bench_decode.sdpa(problem, SDPBackend.CUDNN_ATTENTION)

        def replay(calls: bench_decode.Calls) -> harness.Step:
            kept: list[torch.Tensor] = []
            graph = kernel_timing.graph_of(calls, kept)
            return lambda: (graph.replay(), kept[-1])[1]

        return in_turn({OURS: replay(ours), PEER: replay(peer)}, device)

    return make


Masked = Callable[..., torch.Tensor]


def _padding(keys: int, queries: int, lengths: torch.Tensor) -> torch.Tensor:
    return (torch.arange(keys) < lengths[:, None])[:, None, None, :]


def _causal_and_padding(keys: int, queries: int, lengths: torch.Tensor) -> torch.Tensor:
    at = torch.arange(keys)
    return (at < lengths[:, None])[:, None, None, :] & (at[:, None] >= at[None, :])


def _cache(keys: int, queries: int, lengths: torch.Tensor) -> torch.Tensor:
    return (torch.arange(keys) <= lengths[:1, None])[None, None]


def _attention(mask: Masked, shape: tuple[int, int, int, int, int]) -> Make:
    """An attention that both sides compile. mask: from lengths of a batch. shape: batch, heads, queries, keys, head dim."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(k.shape[2], q.shape[2], lengths))

    def make(device: str) -> Timing:
        batch, heads, queries, keys, head_dim = shape
        torch.manual_seed(0)
        q, k, v = (torch.randn(batch, n, heads, head_dim, device=device).transpose(1, 2) for n in (queries, keys, keys))
        lengths = torch.linspace(keys // 4, keys, batch).long()
        torch.compiler.reset()
        steps: dict[str, harness.Step] = {}
        for side, backend in _SIDES.items():
            compiled = torch.compile(attend, backend=backend, dynamic=False)
            steps[side] = lambda run=compiled: run(q, k, v, lengths)
            steps[side]()
        return in_turn(steps, device)

    return make


def _row(name: str, kind: Kind, make: Make, peer: str = harness.BASELINE) -> Row:
    return Row(name=name, kind=kind, peer=peer, make=make)


def _kernel_rows(name: str, lowering: str, peer: str, case: str) -> tuple[Row, Row]:
    forward, backward = (_kernel(lowering, peer, case, which) for which in ("forward", "backward"))
    return _row(name, "kernel", forward, peer), _row(f"{name}, backward", "kernel", backward, peer)


# Of a CPU what fits into its caches: beyond them, a ratio tells what else reads the machine's memory.
_ON_CPU = (
    _row("padding 2 x 4 x 128 x 64", "kernel", _attention(_padding, (2, 4, 128, 128, 64))),
    _row("causal and padding 1 x 4 x 256 x 64", "kernel", _attention(_causal_and_padding, (1, 4, 256, 256, 64))),
    _row("one query 2 x 4 x 256 x 64", "kernel", _attention(_cache, (2, 4, 1, 256, 64))),
    _row("latent step, 200 keys", "decode", _latent("small_b1_256")),
    _row("llama eager prefill, 2 layers", "end to end", _end_to_end("llama", "eager", "prefill")),
    _row("llama sdpa train, 2 layers", "end to end", _end_to_end("llama", "sdpa", "train")),
    _row("compiling llama sdpa prefill, 2 layers", "first step", _first_step("llama", "sdpa", "prefill")),
)
_ON_GPU = (
    *_kernel_rows("hopper causal 2048 x 128", "hopper", "sdpa_cudnn", "causal_d128_s2048"),
    *_kernel_rows("triton padded 2048 x 64", "triton", "sdpa", "padded_d64_s2048"),
    _row("decode 16 x 4096, half full", "decode", _decode("b16_4k_half"), "sdpa_cudnn"),
    _row("decode 1 x 32768", "decode", _decode("b1_32k"), "sdpa_cudnn"),
    _row("latent step, 4000 keys", "decode", _latent("v2_lite_b1_4k")),
    _row("llama sdpa prefill, 2 layers", "end to end", _end_to_end("llama", "sdpa", "prefill")),
    _row("bert eager train, padded, 2 layers", "end to end", _end_to_end("bert", "eager", "train_padded")),
    _row(
        "compiling llama sdpa prefill, padded, 2 layers", "first step", _first_step("llama", "sdpa", "prefill_padded")
    ),
)
