"""Which variants of kernels launches ask Triton for, and which are asked for ahead of them: python -m tests.lowerings.shared.asked_variants

Runs in a process of its own, since Triton's interpreter, which the other tests use, has no variants. Each body of the cases is called
with tensors, whose launches are looked at in place of Triton's own way, and with stand-ins, whose launches are noted. Triton itself says
of both what it would compile; nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from attn_compiler.lowerings.decode import latent_launch, launch as decode_launch
from attn_compiler.lowerings.fp8 import rounding_launch
from attn_compiler.lowerings.hopper import fp8_launch as hopper_launch
from attn_compiler.lowerings.linear import triton_backward, triton_launch as linear_launch, triton_step
from attn_compiler.lowerings.shared.calls import listing_launch
from attn_compiler.lowerings.shared.launching import ahead, compiling, dry_tensors
from attn_compiler.lowerings.shared.launching.dry_run import noter
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_outputs
from attn_compiler.lowerings.shared.ops.listing import OPEN
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.lowerings.triton import launch
from benchmarks import kernel_code
from tests.lowerings.kernel_cases import BY_NAME
from tests.lowerings.kernel_problems import build, planned
from tests.lowerings.linear.triton_problems import FORMS, problem

BODIES = (
    (launch, "forward"),
    (launch, "gradients"),
    (decode_launch, "forward"),
    (latent_launch, "forward"),
    (hopper_launch, "forward"),
    (rounding_launch, "mean_fp8"),
    (rounding_launch, "largest_fp8"),
    (rounding_launch, "round_fp8"),
    (listing_launch, "lists"),
    (linear_launch, "forward"),
    (triton_backward, "backward"),
    (triton_step, "one_token"),
)
CASES = (
    "triton plain_64",
    "triton causal_192_128",
    "triton window_softcap_sinks_64",
    "triton keys_128",
    "triton documents_64",
    "triton mask_bqk_128",
    "triton bias_hqk_64",
    "triton bias_softcap_64",
    "triton distances_64",
    "triton dropout_64",
    "triton odd_lengths_64",
    "triton one_query_64",
    "triton bias_float32_64",
    "decode head_dim_128",
    "decode keys_sinks",
    "decode fp8",
    "latent 16",
    "latent 128",
    "hopper causal_64 accurate",
    "round 64 rotated",
    "round 128",
    "lists",
    "any size",
    "linear",
)


class Watch:
    """Looks at bodies for as long as the process runs: ops keep those that they find. calls: so far, each with the variants of its launches
    and those that were noted."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._is_within = False
        for module, name in BODIES:
            setattr(module, name, self._watched(getattr(module, name)))

    def _watched(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            # A body that copies its tensors calls itself again.
            if noter() is not None or self._is_within:
                return body(*given, **named)
            self._is_within = True
            launched, results = _launched(body, given, named)
            self._is_within = False
            call = _described(body, given, named)
            of_gpu = dataclasses.replace(call, arguments=_on_gpu(call.arguments), named=_on_gpu(call.named))
            found = {"launched": launched, "noted": _noted(call), "noted_on_gpu": _noted(of_gpu)}
            self.calls.append({"body": body.__module__, **found})
            return results

        return call


def _lists() -> None:
    keys, rows = torch.ones(2, 100, dtype=torch.bool), torch.ones(2, 1, 64, dtype=torch.int32)
    for by_key in (False, True):
        for length in (100, 96, 1):
            listing_launch.lists(
                None, keys[:, :length], None, None, None, 64, length, OPEN, 0, True, 64, 32, by_key, by_key
            )
        listing_launch.lists(rows, keys[:1], None, None, None, 64, 100, OPEN, OPEN, False, 128, 64, by_key, False)


def _any_size() -> None:
    """Forward and backward of four lengths, by a text whose sizes are symbolic."""
    for length in (143, 396, 256, 512):
        case = dataclasses.replace(BY_NAME["documents"], seqlen_q=length, seqlen_kv=length)
        problem = build(case, dtype=torch.float16)
        with planned(problem.plan):
            call = Call.from_text(problem.text)
            shape = (*call.spec.q.shape[:2], "s0", call.spec.q.shape[3])
            spec = dataclasses.replace(call.spec, q=dataclasses.replace(call.spec.q, shape=shape))
        text = dataclasses.replace(call, spec=spec).to_text()
        q, k, v, *operands = (x.detach() for x in (problem.q, problem.k, problem.v, *problem.operands))
        out, lse = empty_outputs(q, v)
        with planned(problem.plan):
            launch.forward(q, k, v, operands, text)
            launch.gradients(out, lse, q, k, v, operands, out, lse, text)


def _launched(body: Callable[..., Any], given: Any, named: Any) -> tuple[list[str], Any]:
    found: list[str] = []
    is_asked = False

    def look(self: Any, *positional: Any, grid: Any, warmup: bool, **others: Any) -> Any:
        nonlocal is_asked
        if is_asked:
            return run(self, *positional, grid=grid, warmup=warmup, **others)
        is_asked = True
        found.extend(_keys(self, positional, others))
        is_asked = False
        return None

    run = JITFunction.run
    with mock.patch.object(JITFunction, "run", look):
        results = body(*given, **named)
    return found, results


def _described(body: Callable[..., Any], given: Any, named: Any) -> ahead.LaunchingCall:
    return ahead.LaunchingCall(
        body=body,
        arguments=dry_tensors.described(tuple(given)),
        named=tuple((name, dry_tensors.described(value)) for name, value in named.items()),
    )


def _on_gpu(described: Any) -> Any:
    """The same of tensors of a GPU, which is not there."""
    if isinstance(described, dry_tensors.TensorLayout):
        return dataclasses.replace(described, device=torch.device("cuda:0"))
    return tuple(map(_on_gpu, described)) if isinstance(described, tuple) else described


def _noted(call: ahead.LaunchingCall) -> list[str]:
    found: list[str] = []
    ahead.note_launches(call, lambda kernel, positional, others: found.extend(_keys(kernel, positional, others)))
    return found


def _keys(kernel: Any, positional: Any, named: Any) -> list[str]:
    """Triton's own: it differs for every other source, signature, constant, alignment, option and machine."""
    return [f"{kernel.fn.__name__} {asked.key}" for asked in compiling.variants(kernel, positional, named)]


def _linear() -> None:
    """Many tokens with gradients, few heads in pieces, and one token, of each recurrence."""
    for name, form in FORMS.items():
        for sizes in ((130, 2, 4, 64, 32), (2100, 1, 1, 16, 16), (1, 2, 4, 64, 32)):
            x = dict(zip(form.roles, (x.detach() for x in problem(form, sizes, batch=1)), strict=True))
            heads, half = (("C", "B", "x") if name == "ssd" else ("q", "k", "v")), torch.bfloat16
            steps = (x["dt"], x["dt"]) if name == "ssd" else (x["g"], x["beta"])
            given = (*(x[role].to(half) for role in heads), *steps, x.get("D"), x.get("state"), form.text)
            out, last = linear_launch.forward(*given)
            triton_backward.backward(out, last, *given)
            if sizes[0] == 1 and "state" in x:
                triton_step.one_token(*given)


OWN = {"lists": _lists, "any size": _any_size, "linear": _linear}


def main() -> None:
    triton.runtime.driver.set_active(kernel_code._Driver())
    properties = SimpleNamespace(multi_processor_count=kernel_code._PROCESSORS)
    mock.patch.object(torch.cuda, "current_device", return_value=0).start()
    mock.patch.object(torch.cuda, "get_device_properties", return_value=properties).start()
    watch, found = Watch(), {}
    with torch.no_grad():
        for case in CASES:
            (OWN[case] if case in OWN else kernel_code._cases()[case])()
            found[case], watch.calls = watch.calls, []
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
