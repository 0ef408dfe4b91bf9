"""Times of one site with several lowerings, each run as in a model's graph: forward, and backward where the site is differentiated."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from attn_compiler.lowerings.base import Lowering, Operands
from attn_compiler.lowerings.choice.timed import clock, values, which
from attn_compiler.lowerings.choice.timed.eager import EagerEmitter
from attn_compiler.lowerings.choice.timed.values import NoValues, RealTensors, SiteTensors
from attn_compiler.spec.added_scores import Bias
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.target import Target

log = logging.getLogger(__name__)

#: a site may take a quarter of the memory that is free
_SHARE = 4


def microseconds(
    spec: AttentionSpec,
    target: Target,
    lowerings: Sequence[Lowering],
    fakes: SiteTensors,
    device: torch.device,
) -> dict[str, float]:
    """Return the time of one call with each lowering, by name; lowerings that fail there are missing. lowerings: take the spec on this
    machine.

    The random generator is not the model's. Nothing is left on the GPU. Raises NoValues, and OutOfMemoryError of PyTorch.
    """
    if torch.cuda.is_current_stream_capturing():
        raise NoValues("a CUDA graph is being recorded")
    emitters = {lowering.name: EagerEmitter(target) for lowering in lowerings}
    with torch.cuda.device(device), torch.autocast("cuda", enabled=False), torch.inference_mode(False):
        try:
            if _SHARE * which.bytes_of(spec) > _free(device):
                raise NoValues("little memory is free")
            tensors = values.real(spec, fakes, device)
            ready: dict[str, Callable[[], object]] = {}
            for lowering in lowerings:
                computation = _computation(spec, target, lowering, tensors, emitters[lowering.name])
                if computation is not None:
                    ready[lowering.name] = computation
            return clock.microseconds(ready, device)
        finally:
            torch.cuda.synchronize(device)
            for emitter in emitters.values():
                emitter.let_go()


def _computation(
    spec: AttentionSpec, target: Target, lowering: Lowering, tensors: RealTensors, emitter: EagerEmitter
) -> Callable[[], object] | None:
    """Return the computation of one call, after it ran twice; None where it fails. Tensors that layers of a model share are made before."""
    try:
        operands, leaves = _operands(emitter, tensors)
        run = functools.partial(_run, spec, target, lowering, emitter, operands, leaves)
        with torch.set_grad_enabled(spec.needs_grad):
            run()
            if _makes_bias(spec) and operands.mask is not None and operands.mask.users:
                run = functools.partial(_with_bias_made, operands.mask.meta["example_value"], run)
            emitter.forget()
            run()
    except Exception as error:  # noqa: BLE001 (whatever is wrong with a lowering here, the others are timed; it is not chosen)
        log.debug("%s was not timed: %r", lowering.name, error)
        return None
    return functools.partial(_once, spec.needs_grad, emitter, run)


def _free(device: torch.device) -> int:
    """Return the bytes that an allocation may take, PyTorch's cached ones included."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _once(with_grad: bool, emitter: EagerEmitter, run: Callable[[], object]) -> None:
    emitter.forget()
    with torch.set_grad_enabled(with_grad):
        run()


def _operands(emitter: EagerEmitter, tensors: RealTensors) -> tuple[Operands, list[Tensor]]:
    """Return the nodes of a site's tensors, and the tensors with a gradient."""
    further = tensors.further
    named = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "mask": further.mask, "sinks": further.sinks}
    nodes = {name: emitter.given(name, x) for name, x in named.items() if x is not None}
    loads = {name: emitter.given("load", x) for name, x in further.loads.items()}
    score_loads = {name: emitter.given("score_load", x) for name, x in further.score_loads.items()}
    given = [emitter.value(node) for node in (*nodes.values(), *score_loads.values())]
    operands = Operands(
        q=nodes["q"],
        k=nodes["k"],
        v=nodes["v"],
        mask=nodes.get("mask"),
        sinks=nodes.get("sinks"),
        loads=loads,
        score_loads=score_loads,
    )
    return operands, [x for x in given if x.requires_grad]


def _run(
    spec: AttentionSpec,
    target: Target,
    lowering: Lowering,
    emitter: EagerEmitter,
    operands: Operands,
    leaves: Sequence[Tensor],
) -> None:
    demand = lowering.demand(spec)

    def read(node: fx.Node, x: TensorSpec) -> fx.Node:
        return emitter.call(torch.Tensor.contiguous, node) if demand.broken_by(x) else node

    given = dataclasses.replace(
        operands, q=read(operands.q, spec.q), k=read(operands.k, spec.k), v=read(operands.v, spec.v)
    )
    out = emitter.value(lowering.emit(emitter, lowering.plan(spec, target), given))
    if spec.needs_grad and leaves:
        torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)


def _makes_bias(spec: AttentionSpec) -> bool:
    """Return whether the model computes the added tensor anew in each layer, from a table or a formula."""
    return bool(spec.score.proved) and not all(isinstance(kind, Bias) for kind in spec.score.proved)


def _with_bias_made(bias: Tensor, run: Callable[[], object]) -> None:
    """Copy a bias, as a lower bound on the time of making it, and run."""
    bias.detach().clone()
    run()
