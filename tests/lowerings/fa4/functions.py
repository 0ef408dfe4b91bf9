"""Holds what is replayed against what flash_attn's own functions launch, kernel by kernel and argument by argument.

    python -O -m tests.lowerings.fa4.functions

The functions run on the CPU, with kernels that note their arguments and do nothing; -O leaves out the assertions that tensors are on a
GPU. Prints how many launches were compared. Raises AssertionError, naming the problem, where two differ.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

os.environ |= {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attn_compiler.lowerings.fa4 import launch, replay
from attn_compiler.lowerings.shared.launching import replaying
from attn_compiler.lowerings.shared.launching.replaying import replay_of
from tests.lowerings.fa4.cases import PROBLEMS, Built, inputs

Noted = list[tuple[Any, list[Any]]]


class Kernels:
    """In place of a cache: every key has a kernel, which notes itself and what it is given. names: of tensors, by address."""

    def __init__(self, noted: Noted, names: dict[int, str]) -> None:
        self._noted, self._names = noted, names

    def __contains__(self, key: Any) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        def note(*arguments: Any) -> None:
            with _disable_current_modes():
                self._noted.append((key, [self._described(value) for value in arguments]))

        return note

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = self._names.get(value.data_ptr(), "allocated")
            is_zero = name == "allocated" and not value.any().item()
            return name, tuple(value.shape), value.stride(), value.dtype, is_zero, value.requires_grad
        if isinstance(value, tuple):
            return type(value), [self._described(item) for item in value]
        return value


def given_of(built: Built) -> dict[str, Tensor]:
    """Everything that a backward has, and a forward."""
    q, k, v = (x.detach() for x in (built.q, built.k, built.v))
    out = torch.ones(*q.shape[:1], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype)
    lse = torch.ones(q.shape[:3])
    given = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2), "out": out, "lse": lse}
    given |= {"grad_out": out.clone(), "grad_lse": lse.clone()}
    given |= {
        f"grad_{name}": torch.ones(x.shape, dtype=x.dtype).transpose(1, 2)
        for name, x in zip("qkv", (q, k, v), strict=True)
    }
    return given | ({} if built.sinks is None else {"sinks": built.sinks.detach()})


def compare(built: Built, *, deterministic: bool) -> int:
    """The number of launches of one problem."""
    prepared = launch._prepared(built.text(deterministic=deterministic))
    given, other = given_of(built), given_of(built)
    count = 0
    for function in (launch._flash_forward, launch._flash_backward):
        noted: Noted = []
        names: dict[int, str] = {}
        for launching in launch._launching():
            launching.compile_cache = Kernels(noted, names)
        names |= _addresses(given)
        with replay.watching(launch._launching()) as watch:
            results = function(prepared, given)
        recording = watch.recording(given, results)
        if recording is None:
            raise AssertionError("not recorded")
        first = noted.copy()
        noted.clear()
        names.clear()
        names |= _addresses(other)
        names_of = (*other, *recording.made)
        inputs = [x.transpose(1, 2) if x.dim() == 4 else x for x in other.values()]
        again = replay_of(
            torch.device("cpu"), [recording], recording.empties, inputs=other, returned=("q", "k", "v", [*names_of])
        )
        replayed = dict(zip(names_of, again.run(inputs)[3], strict=True))
        # Nothing that is recorded may be an allocation of the recorded call.
        if noted != first:
            raise AssertionError(f"{first}\n{noted}")
        if not set(results) <= set(replayed) or not first:
            raise AssertionError(f"{list(results)}, {len(first)} launches")
        count += len(first)
    return count


def _addresses(given: Mapping[str, Tensor]) -> dict[int, str]:
    return {tensor.data_ptr(): name for name, tensor in given.items()}


def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, but what is unfilled is not zero by chance."""

    def call(*arguments: Any, **further: Any) -> Tensor:
        made = allocate(*arguments, **further)
        with _disable_current_modes():
            return made.fill_(7)

    return call


def main() -> None:
    """Every problem."""
    torch.empty, torch.empty_like = filled(torch.empty), filled(torch.empty_like)
    torch.empty_strided = filled(torch.empty_strided)
    replaying.current_cuda_device = lambda: -1
    count = 0
    for problem in PROBLEMS:
        if problem.case.layout.startswith(("expanded", "last")):
            continue  # copied before they come to the op
        for deterministic in (False, True):
            try:
                count += compare(inputs(problem, device="cpu"), deterministic=deterministic)
            except AssertionError as difference:
                raise AssertionError(problem.name) from difference
    sys.stdout.write(f"{count} launches are the same\n")


if __name__ == "__main__":
    main()
