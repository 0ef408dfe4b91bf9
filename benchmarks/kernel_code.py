"""The machine code of the Triton kernels for sm_90, as fingerprints that two checkouts can be compared by. No GPU is needed.

    python -m benchmarks.kernel_code > before.csv
    python -m benchmarks.kernel_code --against before.csv > after.csv

A case is launched on a CPU as on a GPU, by the project's own launch code and with Triton's own specialisation of the arguments, but what
would run is only compiled. So the fingerprints hold whatever way the kernels take their arguments.

registers, stack, shared: of a kernel. instructions: how many there are. sass: a digest of the machine code. moved: the same without the
places of the arguments in constant memory. opcodes: a digest of how often each instruction is there, whatever its registers.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import functools
import hashlib
import re
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attn_compiler.lowerings.decode import latent_schedule, schedule as decode_schedule
from attn_compiler.lowerings.fp8 import rounding_launch
from attn_compiler.lowerings.fp8.rounding import How, Rounding
from attn_compiler.lowerings.hopper import backward_launch, fp8_launch as hopper_launch, launch as hopper_half_launch
from attn_compiler.lowerings.shared.launching import persistent
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.lowerings.triton import launch
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from attn_compiler.spec.target import Target
from benchmarks.harness import arg, command, read
from tests.lowerings.decode import latent_problems, problems as decode_problems
from tests.lowerings.decode.kernels import compiling as decode_compiling
from tests.lowerings.fp8 import problems as fp8_problems
from tests.lowerings.hopper import problems as hopper_problems
from tests.lowerings.hopper.kernels import compiling as hopper_compiling, compiling_backward
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import build, planned
from tests.lowerings.triton.kernels.compiling import resources, said_of

_SM = 90
#: of an H200
_PROCESSORS = 132
#: what a launch may say of how a kernel is compiled
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")

_SIZES: Any = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 512, "seqlen_kv": 512}
_CAUSAL: Any = {"band": Band(right=0)}
_WINDOW: Any = {"band": Band(left=100, right=0)}


def _case(name: str, **further: Any) -> Case:
    """A case whose name ends with its head dim."""
    return Case(name=name, **{**_SIZES, "head_dim": int(name.split("_")[-1]), **further})


_TRITON = (
    _case("plain_64"), _case("plain_128"), _case("causal_64", **_CAUSAL), _case("causal_128", **_CAUSAL),
    _case("causal_80", **_CAUSAL), _case("causal_192_128", head_dim=192, head_dim_v=128, **_CAUSAL),
    _case("causal_256", **_CAUSAL), _case("unaligned_65", **_CAUSAL), _case("window_128", **_WINDOW),
    _case("window_softcap_sinks_64", softcap=30.0, sinks=True, **_WINDOW), _case("keys_128", keys="left", **_CAUSAL),
    _case("documents_64", documents=True, **_CAUSAL), _case("rows_64", rows=True), _case("mask_bqk_128", mask="bqk"),
    _case("mask_k_64", mask="k"), _case("bias_hqk_64", bias="hqk"), _case("bias_bhqk_128", bias="bhqk", **_CAUSAL),
    _case("bias_hq_64", bias="hq"), _case("bias_softcap_64", bias="hqk", softcap=30.0),
    _case("bias_held_128", bias="qk", bias_grad=False, keys="right"), _case("distances_64", distances=4, keys="right"),
    _case("distances_softcap_64", distances=4, softcap=30.0), _case("slopes_128", slopes=True, **_CAUSAL),
    _case("dropout_64", dropout_p=0.1, **_CAUSAL), _case("unlisted_64", few_pairs=True, rows=True, bias="hqk"),
    _case("odd_lengths_64", keys="right", seqlen_q=509, seqlen_kv=511, **_CAUSAL),
    _case("one_query_64", band=Band(right=0, from_end=True), seqlen_q=1),
)  # fmt: skip
_FLOAT32 = (_case("causal_float32_64", **_CAUSAL), _case("bias_float32_64", bias="hqk"))
_RECIPES = {
    "head": Fp8Recipe(scaling=CurrentScaling(granularity="head")),
    "accurate": Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True),
}
_HOPPER = (
    (_case("causal_64", **_CAUSAL), "accurate"), (_case("causal_128", **_CAUSAL), "head"), (_case("plain_128"), "head"),
    (_case("window_64", **_WINDOW), "head"), (_case("softcap_sinks_64", softcap=30.0, sinks=True, **_CAUSAL), "head"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Code:
    """One kernel of one case. nth: of the launches of that kernel."""

    case: str
    kernel: str
    nth: int
    registers: int
    stack: int
    shared: int
    instructions: int
    sass: str
    moved: str
    opcodes: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a case. nth: of those of that kernel. options: how the kernel is compiled, as Triton names it."""

    case: str
    kernel: str
    nth: int
    grid: tuple[int, ...]
    options: tuple[tuple[str, int], ...]


class _Driver:
    """An H200 that is not there: it has a name and runs nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", _SM, 32)

    def launcher_cls(self, src: Any, metadata: Any) -> None:
        """What a launch would build, beside the kernel."""


@contextlib.contextmanager
def _compiled() -> Iterator[list[Any]]:
    """What is launched in here, compiled and not run."""
    found: list[Any] = []
    launched = JITFunction.run

    def record(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        kernel = launched(self, *given, grid=grid, warmup=True, **named)
        found.append(kernel)
        return kernel

    with _launched_by(record):
        yield found


@contextlib.contextmanager
def _launched_by(run: Callable[..., Any]) -> Iterator[None]:
    # Each process looks at cases only, and leaves the driver as it is.
    triton.runtime.driver.set_active(_Driver())
    with mock.patch.object(JITFunction, "run", run), torch.no_grad():
        yield


def _triton(case: Case, dtype: torch.dtype) -> None:
    problem = build(case, dtype=dtype, device="cpu", target=Target.fake(sm=_SM))
    with planned(problem.plan):
        given = (problem.q, problem.k, problem.v, problem.operands)
        out, lse = launch.forward(*given, problem.text)
        launch.gradients(out, lse, *given, out, lse, problem.text)


def _decode(name: str) -> None:
    case = decode_compiling.CASES[name]
    spec = decode_problems.build(case, dtype=torch.bfloat16, device="cpu").spec
    schedule = decode_schedule.table(spec, Target.fake(sm=_SM))
    decode_problems.results(decode_problems.build(case, dtype=torch.bfloat16, device="cpu", schedule=schedule))


def _latent(heads: int) -> None:
    """Many heads in one split."""
    case = decode_problems.Case(name="latent", heads_q=heads, seqlen_kv=1024, splits=4 if heads < 64 else 1)
    given: Any = {"rank": 512, "rope": 64, "dtype": torch.bfloat16, "device": "cpu"}
    schedule = latent_schedule.schedule(latent_problems.of_latent(case, **given).spec, Target.fake(sm=_SM))
    latent_problems.results(latent_problems.of_latent(case, **given, schedule=schedule))


def _fp8(case: Case, recipe: str) -> None:
    target = Target.fake(sm=_SM)
    given = fp8_problems.build(case, _RECIPES[recipe], dtype=torch.bfloat16, device="cpu", target=target)
    problem = given.problem
    with planned(problem.plan), mock.patch.object(persistent, "programs", _programs):
        hopper_launch.forward(problem.q, problem.k, problem.v, given.operands, problem.text)


def _programs(blocks: int, device: torch.device) -> tuple[int, int, int]:
    """As `persistent.programs` says of an H200."""
    return min(blocks, _PROCESSORS), 1, 1


def _half(case: Case) -> None:
    target = Target.fake(sm=_SM)
    problem = hopper_problems.build(case, dtype=torch.bfloat16, device="cpu", target=target)
    read = hopper_problems.operands(problem)
    with planned(problem.plan), mock.patch.object(persistent, "programs", _programs):
        hopper_half_launch.forward(problem.q, problem.k, problem.v, read, problem.text)


def _rounding(head_dim: int, rotated: bool) -> None:
    x = [torch.ones(2, 512, 16, head_dim, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    q, k = How(format="e4m3", of_keys=False), How(format="e4m3", of_keys=True)
    if rotated:
        q, k = How(format="int8", rotated=True, has_shift=True), How(format="int8", rotated=True, has_mean=True)
    how = Rounding(each=(q, k, How(format="e4m3", turned=True, restore="bfloat16")), block=128).to_text()
    seen = None if rotated else torch.ones(2, 512, dtype=torch.bool)
    mean = rounding_launch.mean_fp8(x[1], rotated, seen) if rotated else None
    rounding_launch.largest_fp8(x, mean, how, seen)
    rounding_launch.round_fp8(x, mean, [], how, seen)


def _half_backward(case: Case) -> None:
    problem = hopper_problems.build(case, dtype=torch.bfloat16, device="cpu", target=Target.fake(sm=_SM))
    given = (problem.q, problem.k, problem.v)
    out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:3])
    read = (*given, hopper_problems.grad_operands(problem), out, lse, problem.text)
    properties = types.SimpleNamespace(multi_processor_count=_PROCESSORS)
    machine = mock.patch.object(torch.cuda, "get_device_properties", return_value=properties)
    with planned(problem.plan), mock.patch.object(persistent, "programs", _programs), machine:
        backward_launch.gradients(out, lse, *read)


def _cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for dtype, cases in ((torch.bfloat16, _TRITON), (torch.float32, _FLOAT32)):
        found |= {f"triton {case.name}": functools.partial(_triton, case, dtype) for case in cases}
    found |= {f"decode {name}": functools.partial(_decode, name) for name in decode_compiling.CASES}
    found |= {f"latent {heads}": functools.partial(_latent, heads) for heads in (16, 32, 128)}
    for case, recipe in _HOPPER:
        found[f"hopper {case.name} {recipe}"] = functools.partial(_fp8, case, recipe)
    for case in (*hopper_compiling.CASES, *hopper_compiling.WIDE):
        found[f"hopper half {case.name}"] = functools.partial(_half, case)
    for case in (*compiling_backward.CASES, *compiling_backward.WIDE):
        found[f"hopper half {case.name}"] = functools.partial(_half_backward, case)
    for head_dim in (64, 128):
        for rotated in (False, True):
            found[f"round {head_dim}{' rotated' if rotated else ''}"] = functools.partial(_rounding, head_dim, rotated)
    return found


def code_of(case: str) -> list[Code]:
    """Of each kernel that a case launches."""
    with _compiled() as kernels:
        _cases()[case]()
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for kernel in kernels:
        found.append(_read(case, kernel, seen[kernel.name]))
        seen[kernel.name] += 1
    return found


def names() -> list[str]:
    """Of the cases."""
    return list(_cases())


def launches_of(case: str) -> list[Launch]:
    """Of a case, none of which is compiled."""
    found: list[Launch] = []
    counts: collections.Counter[str] = collections.Counter()

    def record(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        name = self.fn.__name__
        options = tuple((option, int(named[option])) for option in _OPTIONS if option in named)
        found.append(Launch(case=case, kernel=name, nth=counts[name], grid=tuple(grid), options=options))
        counts[name] += 1

    with _launched_by(record):
        _cases()[case]()
    return found


def _read(case: str, kernel: Any, nth: int) -> Code:
    binary = kernel.asm["cubin"]
    registers, stack = resources(binary)
    lines = [line for line in map(_instruction, said_of(binary, "-sass").splitlines()) if line]
    counts = collections.Counter(re.sub(r"^@!?U?P\w+ ", "", line).split(" ")[0] for line in lines)
    return Code(
        case=case, kernel=kernel.name, nth=nth, registers=registers, stack=stack, shared=kernel.metadata.shared,
        instructions=len(lines), sass=_digest("\n".join(lines)),
        moved=_digest("\n".join(re.sub(r"(c\[0x0\])\[[^]]*\]", r"\1[]", line) for line in lines)),
        opcodes=_digest(repr(sorted(counts.items()))),
    )  # fmt: skip


def _instruction(line: str) -> str:
    """Without its address and its bits."""
    found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line)
    return "" if found is None else found[1]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(before: list[dict[str, str]], after: list[dict[str, str]]) -> list[str]:
    """A line for each kernel that differs, and one with the numbers of those that do not."""
    old = {(row["case"], row["kernel"], row["nth"]): row for row in before}
    new = {(row["case"], row["kernel"], row["nth"]): row for row in after}
    counts: collections.Counter[str] = collections.Counter()
    said = []
    for name in sorted(old.keys() | new.keys()):
        verdict = _verdict(old.get(name), new.get(name))
        counts[verdict] += 1
        if verdict != "the same machine code":
            said.append(f"{' '.join(name)}: {verdict}")
    return [*said, ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))]


def _verdict(old: dict[str, str] | None, new: dict[str, str] | None) -> str:
    if old is None or new is None:
        return "only before" if new is None else "only after"
    ways = {
        "sass": "the same machine code",
        "moved": "arguments elsewhere",
        "opcodes": "the same instructions, reordered",
    }
    columns = ("registers", "stack", "shared", "instructions")
    for column, verdict in ways.items():
        if old[column] == new[column] and all(old[name] == new[name] for name in columns):
            return verdict
    return "another: " + ", ".join(f"{name} {old[name]} to {new[name]}" for name in columns)


@command(
    __doc__,
    arg("--against", type=Path, help="what this printed in another checkout"),
    arg("--only", default="", help="cases whose names contain this"),
    arg("--processes", type=int, default=2),
)
def main(given: Namespace) -> None:
    wanted = [name for name in names() if given.only in name]
    with ProcessPoolExecutor(max_workers=given.processes) as pool:
        codes = [code for found in pool.map(code_of, wanted) for code in found]
    rows = [{key: str(value) for key, value in asdict(code).items()} for code in codes]
    writer = csv.DictWriter(sys.stdout, [field.name for field in fields(Code)])
    writer.writeheader()
    writer.writerows(rows)
    if given.against is not None:
        before = [row for row in read(given.against) if given.only in row["case"]]
        print("\n".join(compare(before, rows)), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
