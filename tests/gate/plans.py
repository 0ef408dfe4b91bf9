"""What is planned for the cases of the benchmarks, from their specs alone: how decoding is split, which operands are copied, and whose
backward Hopper's forward gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.decode import latent_schedule, schedule
from attn_compiler.lowerings.decode.plan import Schedule
from attn_compiler.lowerings.hopper.call import backward_of
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import layout
from attn_compiler.passes.writing.select import decide
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.target import Target
from benchmarks import bench_mla, decode_cases, kernel_cases, select_cases
from tests.lowerings.golden_decisions import TARGETS

#: machines whose number of multiprocessors and instructions differ
_MACHINES = {
    "sm80": Target.fake(sm=80, processors=108),
    "sm90": Target.fake(),
    "sm100": Target.fake(sm=100, processors=148),
}
#: of each kind of mask one
_COPIED = ("causal_d128_s2048", "full_d64_s512", "window_d128_s8192", "padded_causal_d128_s2048", "sinks_gqa_d64_s2048")

Lines = dict[tuple[str, str, str], str]


def splits() -> Lines:
    """Schedules of decoding: keys of a tile, warps, stages, and how many splits there are."""
    found = {}
    for machine, target in _MACHINES.items():
        for case in decode_cases.CASES:
            spec = decode_cases.build(case, "meta").spec
            found["splits", f"decode {case.name}", machine] = _words(schedule.schedule(spec, target))
        for latent in bench_mla.GPU_CASES:
            spec = bench_mla.spec_of(latent, "bfloat16")
            found["splits", f"latent {latent.name}", machine] = _words(latent_schedule.schedule(spec, target))
    return found


def _words(found: Schedule) -> str:
    splits = f"{found.splits} splits, for Hopper" if found.hopper else f"{found.splits} splits"
    return f"{splits}, {found.keys} keys, {found.warps} warps, {found.stages} stages, {found.slices} slices"


def backwards() -> Lines:
    """Families of backwards, of specs that the kernel for Hopper takes."""
    found = {}
    targets = {"any order": Target.fake(), "deterministic": Target.fake(deterministic=True)}
    for case in (*select_cases.CASES, *kernel_cases.CASES):
        spec = select_cases.spec_of(case, training=True)
        if not by_name("hopper").why_not(spec, Target.fake()):
            found |= {("backwards", case.name, order): backward_of(spec, target) for order, target in targets.items()}
    return found


def copies() -> Lines:
    """Copies and their bytes, of operands that lie in several ways."""
    found = {}
    for name, spec in _laid_out():
        for machine, target in TARGETS.items():
            there = dataclasses.replace(spec, device=target.device)
            lowering = decide(there, target, Options()).lowering
            needed = layout.needed(there, by_name(lowering).demand(there))
            said = ", ".join(f"{copy.operand} {copy.bytes} bytes" for copy in needed) or "no copy"
            found["copies", name, machine] = f"{lowering}: {said}"
    return found


def _laid_out() -> Iterator[tuple[str, AttentionSpec]]:
    for name in _COPIED:
        for training in (False, True):
            spec = select_cases.spec_of(select_cases.BY_NAME[name], training=training)
            title = f"{name}{' training' if training else ''}"
            yield title, spec
            yield f"{title}, head dim first", dataclasses.replace(spec, q=_turned(spec.q), k=_turned(spec.k))
            yield f"{title}, odd rows", dataclasses.replace(spec, v=_odd(spec.v))


def _turned(x: TensorSpec) -> TensorSpec:
    """Positions lie side by side, as after a product that gives kᵀ."""
    _, heads, seqlen, head_dim = map(int, x.shape)
    return dataclasses.replace(x, strides=(heads * seqlen * head_dim, seqlen * head_dim, 1, seqlen))


def _odd(x: TensorSpec) -> TensorSpec:
    """A part of a tensor with one element more in each row."""
    _, heads, seqlen, head_dim = map(int, x.shape)
    row = heads * head_dim + 1
    return dataclasses.replace(x, strides=(seqlen * row, head_dim, row, 1))
