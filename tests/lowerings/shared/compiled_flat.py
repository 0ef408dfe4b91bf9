"""Compiles flat kernels for sm90 as Inductor does, of their text, and asks Inductor what they write. To be run as a program, in a process
without the interpreter.

Prints for each case a `Found`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as copied
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile as compile_kernel
from triton.runtime import driver

from attn_compiler.lowerings.shared.launching import packaged_ops
from attn_compiler.lowerings.shared.limits.triton_releases import FUSION
from attn_compiler.lowerings.shared.ops import listing
from attn_compiler.torch_private import export as torch_export
from attn_compiler.torch_private.op_library import launching_body
from tests.lowerings.kernel_cases import BY_NAME
from tests.lowerings.kernel_problems import build, planned
from tests.lowerings.triton.kernels.compiling import POINTERS

CASES = ("causal", "keys_left", "mask_hqk", "bias_hqk_causal", "softcap_keys", "sinks", "head_dims_80_48", "lists")
_TARGET = GPUTarget("cuda", 90, 32)
_IMPORTS = "import triton\nimport triton.language as tl\n\n@triton.jit\n"


@dataclass(frozen=True, kw_only=True)
class Found:
    """written: parameters that Inductor says are written to, of each launch. code: bytes of machine code."""

    case: str
    written: list[list[str]]
    code: list[int]


class _Machine:
    """What Inductor asks Triton of a GPU."""

    def get_current_target(self) -> GPUTarget:
        return _TARGET


def _call(name: str) -> Callable[[], Any]:
    if name == "lists":
        keys = torch.ones(3, 200, dtype=torch.bool)
        given = (None, keys, None, None, None, 150, 200, listing.OPEN, 0, False, 32, 64, False, False)
        body = launching_body(torch.ops.attn_compiler.tile_lists.default)
        return lambda: packaged_ops.apart(body, *given)
    problem = build(dataclasses.replace(BY_NAME[name], needs_grad=False, bias_grad=False), dtype=torch.bfloat16)
    body = launching_body(torch.ops.attn_compiler.triton.default)

    def call() -> Any:
        with planned(problem.plan), torch.no_grad():
            return packaged_ops.apart(body, problem.q, problem.k, problem.v, problem.operands, problem.text)

    return call


def run(name: str) -> Found:
    launches: list[tuple[Any, Mapping[str, Any]]] = []

    def record(kernel: Any, grid: Any, arguments: Mapping[str, Any], written: Any) -> dict[str, torch.Tensor]:
        launches.append((kernel, arguments))
        return {name: arguments[name] for name in written}

    with mock.patch.object(torch_export, "launched", record):
        _call(name)()
    written = [_written(kernel, given) for kernel, given in launches]
    return Found(case=name, written=written, code=[_compiled(kernel, given) for kernel, given in launches])


def _written(kernel: Any, given: Mapping[str, Any]) -> list[str]:
    table = triton_kernel_wrap.kernel_side_table
    found = triton_kernel_wrap.get_mutated_tensors(
        table.add_kernel(kernel), table.add_constant_args({}), dict(given), {}
    )
    return list(found)


def _compiled(kernel: Any, given: Mapping[str, Any]) -> int:
    """Of the text that Inductor would write into a file."""
    function = getattr(kernel, "fn", kernel) if hasattr(kernel, "configs") else kernel
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "copied.py"
        file.write_text(_IMPORTS + copied(function))
        spec = importlib.util.spec_from_file_location("copied", file)
        if spec is None or spec.loader is None:
            raise ImportError(file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    signature = {name: _type_of(value) for name, value in given.items()}
    source = ASTSource(fn=getattr(module, function.__name__), signature=signature, constexprs={}, attrs={})
    return len(compile_kernel(source, target=_TARGET, options=dict(FUSION)).asm["cubin"])


def _type_of(value: Any) -> str:
    return {**POINTERS, torch.uint8: "*u8"}[value.dtype] if isinstance(value, torch.Tensor) else "i32"


def main() -> None:
    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels that are interpreted are not compiled")
    driver.set_active(_Machine())
    json.dump([asdict(run(name)) for name in CASES], sys.stdout)


if __name__ == "__main__":
    main()
