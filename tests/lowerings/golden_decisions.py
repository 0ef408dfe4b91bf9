"""What is decided for many sites on many machines, as a table.

    python -m tests.lowerings.golden_decisions > tests/lowerings/golden_decisions.csv
    python -m tests.gate                            # this and all else that is the same in every run

A change of the code that is not meant to change decisions leaves the table as it is. One that is shows up in the difference.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.lowerings.linear import table as linear_table
from attn_compiler.options.options import Options
from attn_compiler.passes.unpad.packing import LEAVING_OUT
from attn_compiler.passes.writing.select import decide
from attn_compiler.reasons.decisions import Decision
from attn_compiler.spec.attention import AttentionSpec, Dim, SizeRange, TensorSpec
from attn_compiler.spec.fp8_recipe import Fp8Recipe
from attn_compiler.spec.mask_kinds import Formula
from attn_compiler.spec.masks import Dense, MaskSpec
from attn_compiler.spec.scores import DenseBias, ScoreSpec
from attn_compiler.spec.target import Target
from benchmarks import bench_mla, decode_cases, kernel_cases, select_cases
from tests import cases
from tests.lowerings.linear import decided_specs

PATH = Path(__file__).with_name("golden_decisions.csv")

#: hexadecimal digits of a digest
_DIGITS = 8
#: the length of those of the measured cases that are also decided with a symbol in its place
_OF_ANY = 2048

TARGETS: dict[str, Target] = {
    "cpu": Target.fake(device="cpu"),
    "cpu_avx512": Target.fake(device="cpu", avx512=True),
    "sm80": Target.fake(sm=80),
    "sm89": Target.fake(sm=89),
    "sm90": Target.fake(),
    "sm90_torch_2.11": Target.fake(torch="2.11.0", triton="3.6.0", ptxas="12.8"),
    "sm90_cudnn_frontend": Target.fake(cudnn_frontend="1.23.0"),
    "sm90_fa4": Target.fake(flash_attn_4="4.0.0b36"),
    "sm100": Target.fake(sm=100, cudnn_frontend="1.23.0"),
}


def of_any_length(spec: AttentionSpec) -> AttentionSpec:
    """A spec, of as many queries as keys, as it is where their number is a symbol."""
    length = spec.seqlen_q
    if length != spec.seqlen_kv or not isinstance(length, int):
        raise ValueError(f"as many queries as keys, got {length} and {spec.seqlen_kv}")

    def tensor(x: TensorSpec) -> TensorSpec:
        batch, heads, _, width = x.shape
        strides = tuple(
            f"{stride // length}*s0" if isinstance(stride, int) and axis < 2 and stride % length == 0 else stride
            for axis, stride in enumerate(x.strides)
        )
        return dataclasses.replace(x, shape=(batch, heads, "s0", width), strides=strides)

    def shape(of: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return (*of[:-2], *("s0" if size == length else size for size in of[-2:]))

    dense = (
        None if spec.mask.dense is None else dataclasses.replace(spec.mask.dense, shape=shape(spec.mask.dense.shape))
    )
    changes = tuple(
        dataclasses.replace(one, shape=shape(one.shape)) if isinstance(one, DenseBias) else one
        for one in spec.score.changes
    )
    return dataclasses.replace(
        spec,
        **{name: tensor(getattr(spec, name)) for name in "qkv"},
        mask=dataclasses.replace(spec.mask, dense=dense),
        score=dataclasses.replace(spec.score, changes=changes),
    )


#: which keys a query sees where rows share prompts, as their packed graph says it: from its row's beginning to itself
_K, _Q = Index("k"), Index("q")
SHARED = (
    Formula(condition=ix.compare("<", _K, Load("unpadded_ends", (_Q,), "int"))),
    Formula(condition=ix.compare(">=", _K, Load("unpadded_begins", (Const(0), _Q), "int"))),
)


def shared(dtype: str, head_dim: int, *, training: bool) -> AttentionSpec:
    """8 rows of 1024 + 256 tokens, of which any number is computed: the keys of all rows lie one behind the other."""
    keys, row = 8 * 1280, 16 * head_dim

    def tensor(heads: int, length: Dim, strides: tuple[Dim, ...]) -> TensorSpec:
        return TensorSpec(shape=(1, heads, length, head_dim), strides=strides, dtype=dtype, requires_grad=training)

    k = tensor(4, keys, (4 * keys * head_dim, keys * head_dim, head_dim, 1))
    return AttentionSpec(
        q=tensor(16, "s0", (f"{row}*s0", head_dim, row, 1)),
        k=k,
        v=k,
        mask=MaskSpec(kinds=SHARED, dense=Dense(shape=(1, 1, "s0", keys), dtype="bool")),
        score=ScoreSpec(scale=head_dim**-0.5),
        device="cuda",
        out_dtype=dtype,
        needs_grad=training,
        ranges=(SizeRange(size="s0", least=2, most=keys),),
    )


def specs() -> Iterator[tuple[str, AttentionSpec]]:
    """(name, spec): the cases that kernels are tested with, those that the order of lowerings was measured on, the benchmarks' own of
    kernels, decoding and latent attention, and rows that share prompts."""
    for case in cases.CASES:
        for needs_grad in (False, True):
            yield f"{case.name}{'_training' if needs_grad else ''}", cases.build(case, needs_grad=needs_grad).spec
    for measured in select_cases.CASES:
        for training in (False, True):
            spec = select_cases.spec_of(measured, training=training)
            yield f"measured_{measured.name}{'_training' if training else ''}", spec
            if spec.seqlen_q == _OF_ANY:
                yield f"any_length_{measured.name}{'_training' if training else ''}", of_any_length(spec)
            if not training:
                yield f"measured_{measured.name}_fp8", dataclasses.replace(spec, fp8=Fp8Recipe())
    for kernel in kernel_cases.CASES:
        for training in (False, True):
            spec = select_cases.spec_of(kernel, training=training)
            yield f"kernel_{kernel.name}{'_training' if training else ''}", spec
    for decoded in decode_cases.CASES:
        yield f"decode_{decoded.name}", decode_cases.build(decoded, "meta").spec
    for latent in bench_mla.GPU_CASES:
        yield f"latent_{latent.name}", bench_mla.spec_of(latent, "bfloat16")
    for dtype, head_dim, training in itertools.product(("bfloat16", "float32"), (64, 128), (False, True)):
        name = f"shared_prompts_{dtype}_d{head_dim}{'_training' if training else ''}"
        yield name, shared(dtype, head_dim, training=training)


def decided(spec: AttentionSpec, target: Target) -> str:
    """The lowering, and a digest of all that was refused and why. Of rows that share prompts among kernels that leave out pairs."""
    options = Options(lowerings=LEAVING_OUT) if spec.mask.kinds == SHARED else Options()
    return _said(decide(dataclasses.replace(spec, device=target.device), target, options))


def _said(decision: Decision) -> str:
    said = repr([(refusal.lowering, refusal.reasons) for refusal in decision.refusals])
    return f"{decision.lowering} {hashlib.sha256(said.encode()).hexdigest()[:_DIGITS]}"


def write(file: TextIO) -> None:
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["spec", *TARGETS])
    for name, spec in specs():
        table.writerow([name, *(decided(spec, target) for target in TARGETS.values())])
    for name, linear, asked in decided_specs.specs():
        on_each = [(dataclasses.replace(linear, device=target.device), target) for target in TARGETS.values()]
        table.writerow([name, *(_said(linear_table.decide(spec, target, asked)) for spec, target in on_each)])


def read() -> dict[tuple[str, str, str], str]:
    """The table that is kept."""
    return parsed(PATH.read_text())


def parsed(text: str) -> dict[tuple[str, str, str], str]:
    """A line for each spec and machine, as tests/gate/table.py has them."""
    header, *rows = csv.reader(text.splitlines())
    return {
        ("decision", row[0], machine): value for row in rows for machine, value in zip(header[1:], row[1:], strict=True)
    }


if __name__ == "__main__":
    write(sys.stdout)
