"""One small problem for each family of kernels, of odd sizes, run once on a GPU and compared: what a memory checker is to watch.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.lowerings.sanitized [family ...]

Prints a line a family: which kernels it launched, or why it was left out. Exits with 1 if a result was wrong.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # So that every tensor is an allocation of its own, whose bounds a checker knows. Read when torch is imported.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import contextlib
import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import Lowering
from attn_compiler.lowerings.decode import replaying
from attn_compiler.lowerings.fp8 import rounding as fp8_rounding
from attn_compiler.lowerings.shared.launching import launch as launching
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from attn_compiler.spec.masks import Alignment
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.lowerings import emitting, kernel_problems, poison
from tests.lowerings.decode import problems
from tests.lowerings.fp8 import problems as fp8_problems, test_rounding, test_visible_keys
from tests.lowerings.hopper import problems as hopper_problems, test_fp8_launch as test_hopper_launch
from tests.lowerings.kernel_cases import BY_NAME, Case
from tests.lowerings.specs import refusal

DEVICE = "cuda"
BF16 = torch.bfloat16
RECIPE = Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True)
#: what an FP8 forward and the backward behind it may be off by, as a share of the norm
_SHARE_OF_FP8 = 0.1


class LeftOutError(Exception):
    """A family that this machine does not have, or that does not take the problem."""


# ---- our kernels ----------------------------------------------------------------------------------------------------


def triton(case: Case) -> Callable[[], None]:
    """Forward and every gradient, with the tiles that the lowering chooses."""

    def run() -> None:
        problem = kernel_problems.build(case, dtype=BF16, device=DEVICE, target=Target.current(DEVICE))
        kernel_problems.assert_within_rule(kernel_problems.results(problem), problem)

    return run


def decode(name: str) -> Callable[[], None]:
    def run() -> None:
        problem = problems.build(problems.BY_NAME[name], dtype=BF16, device=DEVICE)
        problems.assert_within_rule(problems.results(problem), problem)

    return run


def hopper_fp8_of_lengths() -> None:
    _needs("hopper_fp8")
    given = test_visible_keys.rounded_of_lengths("causal", Fp8Recipe(), poison.NOT_FINITE, DEVICE)
    clean = test_visible_keys.rounded_of_lengths("causal", Fp8Recipe(), (0.0,), DEVICE)
    with torch.no_grad():
        out, lse = fp8_problems.outputs(given)
        test_hopper_launch.assert_near(clean, out, lse, share=0.04, atol=0.02)


def hopper_fp8(case: Case) -> Callable[[], None]:
    def run() -> None:
        _needs("hopper_fp8")
        given = test_hopper_launch.problem(case, RECIPE, Target.current(DEVICE))
        fp8_problems.assert_within_rule(fp8_problems.results(given), given)

    return run


def hopper(case: Case) -> Callable[[], None]:
    """The kernels, and those for rows and gradients that are to be computed again."""

    def run() -> None:
        _needs("hopper")
        problem = hopper_problems.build(case, dtype=BF16, device=DEVICE, target=Target.current(DEVICE))
        kernel_problems.assert_within_rule(hopper_problems.by_ops(problem), problem)

    return run


def rounding(name: str, head_dim: int) -> Callable[[], None]:
    """Rounding with and without given magnitudes, looking for magnitudes, means; some keys that nobody sees."""

    def run() -> None:
        how = (test_rounding.CASES | test_rounding.ROTATED)[name]
        each = tuple(dataclasses.replace(one, of_keys=i > 0) for i, one in enumerate(how.each))
        how = dataclasses.replace(how, each=each, per="head")
        read = [
            x[:, :, :150]
            for x in test_rounding.sharing_heads(how, test_rounding.given(DEVICE, BF16, head_dim=head_dim))
        ]
        read = [x[:1, :1] for x in read]
        seen = torch.rand(1, 150, device=DEVICE) < 0.7
        mean = fp8_rounding.mean_fp8(read[1], each[1].rotated, seen)
        right = fp8_rounding._mean_in_pytorch(read[1], each[1].rotated, seen)
        torch.testing.assert_close(mean, right, rtol=1e-3, atol=1e-3)
        largest = [torch.full((1, 1, 1), 9.0, device=DEVICE) for _ in read]
        for given in ([], largest):
            mine = fp8_rounding.round_fp8(read, mean, given, how.to_text(), seen)
            wanted = fp8_rounding._round_in_pytorch(read, mean, given, how, seen)
            test_rounding.assert_same(mine, wanted, how)
        found = fp8_rounding.largest_fp8(read, mean, how.to_text(), seen)
        right = fp8_rounding._largest_in_pytorch(read, mean, how, seen)
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-5)

    return run


# ---- kernels of libraries -------------------------------------------------------------------------------------------


def library(name: str, case: cases.Case) -> Callable[[], None]:
    """Forward and gradients of a lowering on a case of tests/cases.py."""

    def run() -> None:
        lowering, inputs = by_name(name), cases.build(case, device=DEVICE)
        _needs(name)
        reasons = refusal(lowering, inputs.spec, Target.current(DEVICE))
        if reasons:
            raise LeftOutError(str(reasons[0]))
        module = emitting.emit(lowering, inputs)
        got = numerics.with_gradients(lambda given: module(*emitting.arguments(given)), inputs)
        numerics.assert_within_rule(got, inputs)

    return run


def compiled(lowering: str, recipe: Fp8Recipe | None, *, lengths: bool = False) -> Callable[[], None]:
    """Forward and gradients through the whole backend; with numbers of keys, one of them none."""

    def run() -> None:
        _needs(lowering)
        given = [torch.randn(2, 201, n, 128, device=DEVICE).to(BF16).transpose(1, 2) for n in (4, 2, 2)]
        numbers = torch.tensor([130, 0], device=DEVICE)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            sdpa = torch.nn.functional.scaled_dot_product_attention
            if not lengths:
                return sdpa(q, k, v, is_causal=True, enable_gqa=True)
            used = torch.arange(201, device=q.device) < numbers[:, None, None, None]
            return sdpa(q, k, v, attn_mask=used, enable_gqa=True)

        options: dict[str, Any] = {"lowering": lowering, "strict": True}
        options |= {} if recipe is None else {"fp8_recipe": recipe}
        backend: Any = torch.compile(attention, backend="attn_compiler", options=options, dynamic=False)
        leaves = [x.clone().requires_grad_() for x in given]
        out = backend(*leaves)
        upstream = torch.randn_like(out)
        exact = [x.float().requires_grad_() for x in given]
        right = attention(*exact)
        pairs = zip(
            (out, *torch.autograd.grad(out, leaves, upstream)),
            (right, *torch.autograd.grad(right, exact, upstream.float())),
            strict=True,
        )
        for mine, wanted in pairs:
            assert float((mine.float() - wanted).norm() / wanted.norm()) < (0.02 if recipe is None else _SHARE_OF_FP8)

    return run


# ---- all of them ----------------------------------------------------------------------------------------------------

_ODD: dict[str, Any] = {"seqlen_q": 157, "seqlen_kv": 213, "head_dim": 72, "heads_q": 4, "heads_kv": 2}
_HALF: dict[str, Any] = {"dtype": BF16, "seqlen_q": 73, "seqlen_kv": 73}
_TENSOR = Fp8Recipe(scaling=CurrentScaling(granularity="tensor"))

FAMILIES: dict[str, Callable[[], None]] = {
    "triton": triton(Case(name="sanitized causal", band=Band(right=0), **_ODD)),
    "triton window": triton(Case(name="sanitized window", band=Band(left=40, right=3, from_end=True), **_ODD)),
    "triton masks": triton(dataclasses.replace(BY_NAME["all_masks"], name="sanitized masks", **_ODD)),
    "triton dropout": triton(BY_NAME["dropout"]),
    "triton wide heads": triton(BY_NAME["head_dims_192_128"]),
    "triton bias": triton(Case(name="sanitized bias", bias="hqk", **_ODD)),
    "triton bias, softcap": triton(Case(name="sanitized bias softcap", bias="bqk", softcap=2.0, **_ODD)),
    "triton distances": triton(Case(name="sanitized distances", distances=4, **_ODD)),
    "triton distances, softcap": triton(Case(name="sanitized distances softcap", distances=4, softcap=2.0, **_ODD)),
    "triton sinks": triton(Case(name="sanitized sinks", sinks=True, band=Band(right=0), **_ODD)),
    "decode": decode("queries_mask"),
    "decode lengths": decode("lengths_of_one_and_none"),
    "decode fp8": decode("fp8_head_dims_80_48"),
    "round": rounding("three", 48),
    "round rotated": rounding("accurate, a shift", 128),
    "hopper_fp8": hopper_fp8(Case(name="sanitized hopper", band=Band(right=0), **_ODD | {"head_dim": 128})),
    "hopper_fp8 window": hopper_fp8(
        Case(
            name="sanitized hopper window",
            band=Band(left=50, right=0),
            sinks=True,
            softcap=2.0,
            **_ODD | {"head_dim": 64},
        )
    ),
    "hopper_fp8 lengths": hopper_fp8_of_lengths,
    "hopper": hopper(Case(name="sanitized hopper 72", band=Band(right=0), **_ODD)),
    "hopper masks": hopper(dataclasses.replace(BY_NAME["all_masks"], name="sanitized hopper masks", mask=None, **_ODD)),
    "hopper window": hopper(
        Case(
            name="sanitized hopper window 128",
            band=Band(left=50, right=0),
            softcap=2.0,
            sinks=True,
            **_ODD | {"head_dim": 128},
        )
    ),
    "hopper keys": hopper(
        Case(name="sanitized hopper keys", keys="left", needs_grad=False, **_ODD | {"head_dim": 256})
    ),
    "hopper lengths": compiled("hopper", None, lengths=True),
    "sdpa_cudnn": library("sdpa_cudnn", cases.Case(name="causal", causal=Alignment.TOP_LEFT, **_HALF)),
    "sdpa_cudnn mask": library("sdpa_cudnn", cases.Case(name="mask", mask="bqk", empty_rows=True, **_HALF)),
    "sdpa_flash": library("sdpa_flash", cases.Case(name="causal", causal=Alignment.TOP_LEFT, **_HALF)),
    "sdpa_efficient": library("sdpa_efficient", cases.Case(name="mask", mask="bqk", empty_rows=True, **_HALF)),
    "fa4": library("fa4", cases.Case(name="causal", causal=Alignment.TOP_LEFT, **_HALF)),
    "cudnn": compiled("cudnn", None),
    "cudnn lengths": compiled("cudnn", None, lengths=True),
    "cudnn_fp8": compiled("cudnn_fp8", _TENSOR),
    "cudnn_fp8 lengths": compiled("cudnn_fp8", _TENSOR, lengths=True),
}


def _needs(name: str) -> None:
    lowering: Lowering = by_name(name)
    reasons = lowering.unavailable(Target.current(DEVICE))
    if reasons:
        raise LeftOutError(str(reasons[0]))


@contextlib.contextmanager
def _launches(names: list[str]) -> Iterator[None]:
    """Names of our Triton kernels, as they are launched for the first time."""
    first = launching._first_launch
    decoding = replaying.launch

    def noted(kernel: Any, *given: Any) -> Any:
        names.append(kernel.fn.__name__)
        return first(kernel, *given)

    def noted_decoding(known: Any, kernel: Any, *given: Any, **options: Any) -> Any:
        names.append(kernel.fn.__name__)
        return decoding(known, kernel, *given, **options)

    with mock.patch.object(launching, "_first_launch", noted), mock.patch.object(replaying, "launch", noted_decoding):
        yield


def outcome(run: Callable[[], None]) -> tuple[bool, str]:
    """Whether a family's results were right, or it was left out; and what to say of it."""
    names: list[str] = []
    try:
        with _launches(names):
            run()
            torch.cuda.synchronize()
    except LeftOutError as left_out:
        return True, f"left out: {left_out}"
    except Exception:  # noqa: BLE001 - the other families are to be run, too
        return False, f"WRONG\n{traceback.format_exc()}"
    return True, ", ".join(["ok", *dict.fromkeys(names)])


def main(wanted: list[str]) -> int:
    if not torch.cuda.is_available():
        sys.stdout.write("needs a CUDA device, and there is none\n")
        return 2
    torch.manual_seed(0)
    all_right = True
    for name, run in FAMILIES.items():
        if not wanted or name.split()[0].rstrip(",") in wanted:
            is_right, words = outcome(run)
            all_right = all_right and is_right
            sys.stdout.write(f"{name}: {words}\n")
            sys.stdout.flush()
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
