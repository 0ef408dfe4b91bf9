"""Compiles the kernels of a launch for Hopper, without one, and says what came out: python -m tests.lowerings.hopper.kernels.compiling

As tests.lowerings.triton.kernels.compiling.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from attn_compiler.lowerings.hopper.kernels.backward_sm90 import attention_backward_sm90
from attn_compiler.lowerings.hopper.kernels.forward_sm90 import attention_forward_sm90
from attn_compiler.lowerings.hopper.kernels.forward_wide_sm90 import attention_forward_wide_sm90
from attn_compiler.lowerings.hopper.kernels.wide_backward_sm90 import attention_grad_wide_sm90
from attn_compiler.lowerings.hopper.kernels.wide_values_sm90 import attention_grad_v_wide_sm90
from attn_compiler.lowerings.shared.kernels.forward import attention_again
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.spec.target import Target
from tests.lowerings.fp8.kernels.descriptors import unset
from tests.lowerings.hopper import problems
from tests.lowerings.hopper.kernels.letting_go import PLACES, LettingGo, letting_go
from tests.lowerings.kernel_cases import Case
from tests.lowerings.triton.kernels.compiling import compiled_for, resources, said_of, say, source

_SIZES: Any = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 1024, "seqlen_kv": 1024, "needs_grad": False}
_CAUSAL: Any = {"band": Band(right=0)}
CASES = (
    Case(name="causal_64", head_dim=64, **_SIZES, **_CAUSAL),
    Case(name="keys_64", head_dim=64, keys="left", **_SIZES, **_CAUSAL),
    Case(name="documents_64", head_dim=64, documents=True, **_SIZES, **_CAUSAL),
    Case(name="causal_128", head_dim=128, **_SIZES, **_CAUSAL),
    Case(name="keys_128", head_dim=128, keys="left", **_SIZES, **_CAUSAL),
    Case(name="documents_128", head_dim=128, documents=True, **_SIZES, **_CAUSAL),
    Case(name="rows_128", head_dim=128, rows=True, **_SIZES),
    Case(name="softcap_128", head_dim=128, softcap=50.0, **_SIZES, **_CAUSAL),
    Case(name="slopes_128", head_dim=128, slopes=True, **_SIZES, **_CAUSAL),
    Case(name="causal_192_128", head_dim=192, head_dim_v=128, **_SIZES, **_CAUSAL),
    Case(name="softcap_256", head_dim=256, softcap=50.0, **_SIZES, **_CAUSAL),
)
#: head dims that are sums of powers of two
SUMMED = (
    Case(name="summed_80", head_dim=80, **_SIZES, **_CAUSAL),
    Case(name="summed_80_full", head_dim=80, **_SIZES),
    Case(name="summed_80_keys", head_dim=80, keys="left", **_SIZES, **_CAUSAL),
    Case(name="summed_96", head_dim=96, **_SIZES, **_CAUSAL),
    Case(name="summed_96_window", head_dim=96, band=Band(left=511, right=0), **_SIZES),
    Case(name="summed_96_documents", head_dim=96, documents=True, **_SIZES, **_CAUSAL),
    Case(name="summed_112", head_dim=112, **_SIZES, **_CAUSAL),
    Case(name="summed_112_keys", head_dim=112, keys="left", **_SIZES, **_CAUSAL),
    Case(name="summed_112_softcap", head_dim=112, softcap=50.0, **_SIZES, **_CAUSAL),
    Case(name="summed_192_128", head_dim=192, head_dim_v=128, **_SIZES, **_CAUSAL),
    Case(name="summed_192_128_keys", head_dim=192, head_dim_v=128, keys="left", **_SIZES, **_CAUSAL),
)
#: with a bias, numbers by distance, or a dense mask
ADDED = (
    Case(name="bias_64", head_dim=64, bias="hqk", **_SIZES),
    Case(name="bias_64_keys", head_dim=64, bias="bhqk", keys="left", **_SIZES, **_CAUSAL),
    Case(name="bias_128", head_dim=128, bias="hqk", **_SIZES),
    Case(name="bias_128_causal", head_dim=128, bias="hqk", **_SIZES, **_CAUSAL),
    Case(name="bias_128_softcap", head_dim=128, bias="hqk", softcap=50.0, **_SIZES),
    Case(name="bias_256", head_dim=256, bias="hqk", **_SIZES),
    Case(name="distances_64", head_dim=64, distances=4, **_SIZES),
    Case(name="distances_128", head_dim=128, distances=4, **_SIZES),
    Case(name="mask_64", head_dim=64, mask="bqk", **_SIZES),
    Case(name="mask_128", head_dim=128, mask="bqk", **_SIZES),
    Case(name="mask_256", head_dim=256, mask="bqk", **_SIZES),
    Case(name="mask_bias_128", head_dim=128, mask="bqk", bias="hqk", **_SIZES),
)
#: head dims above 256
WIDE = (
    Case(name="wide_512", head_dim=512, **_SIZES),
    Case(name="wide_512_causal", head_dim=512, **_SIZES, **_CAUSAL),
    Case(name="wide_512_keys", head_dim=512, keys="left", softcap=50.0, sinks=True, **_SIZES, **_CAUSAL),
    Case(name="wide_512_documents", head_dim=512, documents=True, **_SIZES, **_CAUSAL),
    Case(name="wide_512_mask", head_dim=512, mask="bqk", **_SIZES),
    Case(name="wide_512_slopes", head_dim=512, slopes=True, **_SIZES, **_CAUSAL),
    Case(name="wide_384_causal", head_dim=384, **_SIZES, **_CAUSAL),
)
_KERNELS = {
    "attention_backward_sm90": (attention_backward_sm90, GluonASTSource),
    "attention_forward_sm90": (attention_forward_sm90, GluonASTSource),
    "attention_forward_wide_sm90": (attention_forward_wide_sm90, GluonASTSource),
    "attention_grad_wide_sm90": (attention_grad_wide_sm90, GluonASTSource),
    "attention_grad_v_wide_sm90": (attention_grad_v_wide_sm90, GluonASTSource),
    "attention_again": (attention_again, ASTSource),
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """spilled: bytes of a thread's stack. shared: bytes. Counts of the machine code: products on the tensor cores, also by their columns;
    waits for them; matrices that are loaded from shared memory. read, under_way: `LettingGo`, of what is added to the scores. unset:
    `descriptors.unset`."""

    name: str
    kernel: str
    spilled: int
    shared: int
    products: int
    columns: dict[str, int]
    waits: int
    matrices: int
    read: int
    under_way: list[int]
    unset: list[str]


def run(case: Case) -> list[Found]:
    with problems.summed() if case.name.startswith("summed") else contextlib.nullcontext():
        return _run(case)


def _run(case: Case) -> list[Found]:
    problem = problems.build(case, dtype=torch.bfloat16, device="cpu", target=Target.fake(sm=90))
    launched, tensors = problems.launched(problem, programs=132, in_order=case.name.startswith("in_order"))
    found = []
    for name, arguments in launched.items():
        of = name.partition(" ")[0]
        if of not in _KERNELS:
            continue
        kernel, kind = _KERNELS[of]
        given = {parameter: None if key is None else tensors[key] for parameter, key in arguments.tensors.items()}
        made = source(kernel, {**given, **arguments.numbers}, kind)
        options = {} if arguments.tile is None else arguments.tile.launch_options
        compiled = compiled_for(made, options)
        code = said_of(compiled.asm["cubin"], "-sass")
        let_go = LettingGo(loads=0, under_way=())
        if of in PLACES and (case.bias or case.distances):
            let_go = letting_go(compiled.asm["cubin"], of)
        found.append(
            Found(
                name=case.name,
                kernel=name,
                spilled=resources(compiled.asm["cubin"])[1],
                shared=compiled.metadata.shared,
                products=len(re.findall("HGMMA", code)),
                columns=dict(Counter(re.findall(r"HGMMA\.\d+x(\d+)x", code))),
                waits=len(re.findall("WARPGROUP.DEPBAR", code)),
                matrices=len(re.findall("LDSM", code)),
                read=let_go.loads,
                under_way=list(let_go.under_way),
                unset=unset(code),
            )
        )
    return found


if __name__ == "__main__":
    say(run, (*CASES, *SUMMED, *ADDED, *WIDE))
