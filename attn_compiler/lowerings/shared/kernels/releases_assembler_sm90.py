"""`assembled_jit`: kernels that Triton 3.6 to 3.8 assemble for Hopper by a newer assembler, where their own is known to be wrong
(spec/assemblers.py).

Triton's own compiler compiles them, with a backend that differs in the last step. So all other kernels are assembled as before, in other
threads at the same time, too. A launch is unchanged.
"""

from __future__ import annotations

import functools
import subprocess
import types
from collections.abc import Callable
from typing import Any

import triton
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.compiler import compiler
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from attn_compiler.spec.assemblers import hopper_assembler

_HOPPER, _BLACKWELL = 90, 100


class NewerAssembler(CUDABackend):  # type: ignore[misc]
    """Triton's backend for Nvidia's GPUs, with the assembler that is told, or the one for Blackwell."""

    def make_cubin(self, src: Any, metadata: Any, opt: Any, capability: Any) -> Any:
        make = _with(CUDABackend.make_cubin, get_ptxas=lambda arch: types.SimpleNamespace(path=_program()))
        return make(self, src, metadata, opt, capability)

    def hash(self) -> str:
        """Return a part of the keys of Triton's caches that differs, so that results of the other assembler are not used."""
        return f"ptxas-blackwell {_version(_program())}-{self.target.arch}"


def _program() -> str:
    told: str = hopper_assembler(triton.__version__).program or get_ptxas(_BLACKWELL).path
    return told


@functools.cache
def _version(program: str) -> str:
    return subprocess.check_output([program, "--version"], text=True)


class AssembledKernel(JITFunction):  # type: ignore[misc,type-arg]
    """A kernel that the right assembler assembles on any machine."""

    def create_binder(self) -> Any:
        """Override Triton's method, which selects the compile function of a kernel on a device."""
        compiled, keys, target, backend, binder = super().create_binder()
        self.compile = compile_kernel
        return compiled, keys, target, NewerAssembler(target) if _is_told(target) else backend, binder


class AssembledGluon(AssembledKernel, GluonJITFunction):  # type: ignore[misc,type-arg]
    """Such a kernel in Gluon."""


def assembled_gluon(**options: Any) -> Callable[[Any], Any]:
    """Decorate a kernel in Gluon that is launched, in place of `gluon.jit`."""
    return lambda function: AssembledGluon(function, **options)


def assembled_jit(function: Any = None, **options: Any) -> Any:
    """Decorate a kernel that is launched, in place of `triton.jit`. Functions that such a kernel calls may have `triton.jit`."""
    if function is None:
        return lambda function: assembled_jit(function, **options)
    is_interpreted = triton.knobs.runtime.interpret
    return triton.jit(function, **options) if is_interpreted else AssembledKernel(function, **options)


def compile_kernel(src: Any, target: Any, options: Any = None, **more: Any) -> Any:
    """Replace Triton's `compile`, with the right assembler."""
    return (by_newer if _is_told(target) else compiler.compile)(src, target=target, options=options, **more)


def by_newer(src: Any, target: Any, options: Any = None, **more: Any) -> Any:
    """Replace Triton's `compile`, with the newer assembler. Raises RuntimeError if Triton's function can't be given a backend."""
    chosen = []

    def choose(target: Any) -> NewerAssembler:
        chosen.append(backend := NewerAssembler(target))
        return backend

    made = _with(compiler.compile, make_backend=choose)(src, target=target, options=options, **more)
    if not chosen:
        raise RuntimeError(f"Triton {triton.__version__} did not take the assembler that it was told to take")
    return made


def _with(own: Any, **names: Any) -> Callable[..., Any]:
    """Return a function of Triton's that has other globals of these names."""
    return types.FunctionType(
        own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__
    )


def _is_told(target: Any) -> bool:
    return (target.backend, target.arch) == ("cuda", _HOPPER) and hopper_assembler(triton.__version__).program != ""
