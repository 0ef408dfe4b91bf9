"""Compilation without padding: the packed graph, and beside it the padded graph for calls that the packed one may not serve."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.compiling.attempts import StepFailed, step
from attn_compiler.compiling.inner import Inner
from attn_compiler.passes.unpad import facts, outcome, sharing
from attn_compiler.passes.unpad.outcome import Packed
from attn_compiler.passes.unpad.unpadding import Batch, PackedCode, Unpadded
from attn_compiler.torch_private import packed as torch_packed

log = logging.getLogger(__name__)

#: Code from disk comes with its guards on the number of tokens, which PyTorch takes again; without them it would go unchecked.
_GUARDED = {"unsafe_skip_cache_dynamic_shape_guards": False}


_SKIPS = "triton.cudagraph_skip_dynamic_graphs"
#: Inductor warns of more than eight recordings of one graph.
_NEVER_WARNED = {"triton.cudagraph_dynamic_shape_warn_limit": None}


def compile_unpadded(
    gm: fx.GraphModule, packed: Packed, inner: Inner, example_inputs: Sequence[Any], key: str
) -> Callable[..., Any]:
    """Return the packed graph's code, and the padded graph's for calls that it may not serve. gm: the packed graph. Later compilations get
    fake inputs, since real ones do not show which of their sizes are fixed."""
    compilation, copied = torch_packed.Compilation.current(), torch_packed.copied(gm)
    is_recorded = bool(inner.patches.get("triton.cudagraphs"))
    # A CUDA graph would be recorded for each number of tokens. If the user asks for recordings, numbers come in steps.
    has_steps = is_recorded and inner.patches.get(_SKIPS) is False
    patches = {_SKIPS: True} if is_recorded and not has_steps else _NEVER_WARNED if has_steps else {}
    of_packed = dataclasses.replace(inner, patches=inner.patches | patches | _GUARDED)

    def code(module: fx.GraphModule, inputs: Sequence[Any], further: Sequence[Any]) -> PackedCode:
        run = of_packed.compile_rewritten(module, [*inputs, *further], key)
        return PackedCode(run=run, guards=torch_packed.taken_guards(further[0], packed.fakes))

    def again(number: int) -> PackedCode | None:
        further = packed.further(number)
        try:
            with step(f"compile the packed graph for {number} tokens"), compilation.enter():
                return code(torch_packed.copied(copied), packed.fakes, further)
        except StepFailed as error:
            torch_packed.forget_guards(further)
            log.warning("%s: %s", error.step, error.cause)
            return None

    def original() -> Callable[..., Any]:
        padded = packed.padded
        if padded is not None:
            try:
                with step("compile the padded graph with its kernels"), compilation.enter():
                    outcome.zero_padding(padded.graph_module.graph, packed)
                    padded.graph_module.recompile()
                    return inner.compile_rewritten(padded.graph_module, packed.fakes, key)
            except StepFailed as error:
                log.debug("%s: %s; the model's own graph is compiled", error.step, error.cause)
        own = torch_packed.copied(packed.original)
        outcome.zero_padding(own.graph, packed)
        own.recompile()
        try:
            with step("compile the model's own graph"), compilation.enter():
                return inner.compile_original(torch_packed.copied(own), packed.fakes)
        except StepFailed as error:
            log.debug("%s: %s; it runs op by op", error.step, error.cause)
            return own.forward

    is_awaited = _is_launched(packed.fakes)
    are_later = not is_awaited and not packed.windows
    before, read = _before(packed, inner, are_later=are_later)
    # The times were measured with Inductor.
    is_weighed = inner.options.inner == "inductor" and not inner.options.verify and not is_awaited
    return Unpadded(
        first=code(gm, example_inputs, packed.inputs),
        again=again,
        before=before,
        places=Batch.from_mask if are_later else lambda _, *places: Batch(*places),
        facts=packed.facts,
        original=original,
        steps=packed.steps,
        has_steps=has_steps,
        work=packed.work if is_weighed else None,
        sizes=lambda args: tuple(x.shape if isinstance(x, torch.Tensor) else x for x in (args[i] for i in read)),
        are_awaited=is_awaited,
    )


def _before(packed: Packed, inner: Inner, *, are_later: bool) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """Return the check of `Unpadded` before each call, and the indices of the inputs that it reads.

    On a GPU it is compiled: launches take the host longer than the kernel runs.
    """
    needs_keys = sharing.FACTS[1] in packed.facts
    module, read = facts.with_places(packed.before, packed.windows, needs_keys=needs_keys, are_later=are_later)
    asked: Callable[..., Any] = module
    inputs = [packed.fakes[i] for i in read]
    if inner.options.inner == "inductor" and _is_launched(inputs):
        # A CUDA graph's output is gone at the next call; a backward may still need it.
        unrecorded = dataclasses.replace(inner, patches=inner.patches | {"triton.cudagraphs": False})
        try:
            with step("compile what is asked before each call"), torch.no_grad():
                asked = unrecorded.compile_original(torch_packed.copied(module), inputs)
        except StepFailed as error:
            log.debug("%s: %s; it runs op by op", error.step, error.cause)
    return torch.no_grad()(lambda *args: asked(*(args[i] for i in read))), read


def _is_launched(inputs: Sequence[Any]) -> bool:
    """Return True if ops on these inputs are kernels that the host launches."""
    return any(x.is_cuda for x in inputs if isinstance(x, torch.Tensor))
