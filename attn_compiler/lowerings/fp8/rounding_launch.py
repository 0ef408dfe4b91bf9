"""Launches of the kernels that round tensors, or find their largest magnitudes. Imports triton, so it is imported late."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.fp8.kernels import mean_fp8 as mean_kernels, round_fp8 as kernels, tuples_round
from attn_compiler.lowerings.fp8.rounding import EACH, Per, Rounding, count, empty_outputs, empty_shift
from attn_compiler.lowerings.shared.calls.arguments import along
from attn_compiler.lowerings.shared.launching.launch import Arguments, launch
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.lowerings.shared.launching.replaying import call_cache

#: positions that a program rounds at once
PART = 128
_WARPS = 8
#: registers of a thread: two programs then share a multiprocessor; with head dims up to 64, four
_REGISTERS, _NARROW = 128, 64
#: a program that looks for the largest magnitude: positions at once, rounds, warps
_LOOK_PART, _LOOKS, _LOOK_WARPS = 128, 2, 8
#: a program that sums: positions at once, rounds, warps; one that adds up such sums: sums at once
_SUM_PART, _SUMS, _SUM_WARPS, _SUMS_AT_ONCE = 128, 4, 8, 16
#: blocks of a program with a rotation
_RUN = 8
#: most tensors of a launch
_MOST = 3
_USUAL_WIDTH = 128

Named = Mapping[str, torch.Tensor]


def round_fp8(
    tensors: Sequence[torch.Tensor],
    mean: torch.Tensor | None,
    largest: Sequence[torch.Tensor],
    text: str,
    seen: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Launch `fp8_rounding.round_fp8`."""
    how, named = Rounding.from_text(text), _named(tensors, mean, seen)
    same = call_cache("round_fp8", f"{text} {list(named)} {len(largest)}", [*named.values(), *largest])
    with on(tensors[0].device):
        outputs: list[torch.Tensor] = []
        for i, (x, each) in enumerate(zip(tensors, how.each, strict=True)):
            outputs += empty_outputs(x, largest[i] if largest else None, each, how.block)
        newest = _zeros(tensors, how.per)
        named |= {f"largest{i}": x for i, x in enumerate(largest)}
        for i, each in enumerate(how.each):
            found = dict(zip(("rounded", "descale", "restored"), outputs[EACH * i :], strict=False))
            named |= {f"{name}{i}": x for name, x in found.items() if name != "restored" or each.restore}
        shift = empty_shift(tensors, how)
        named |= {"newest": newest} if how.per else {}
        named |= {"shift": shift[0]} if shift else {}
        launch(kernels.round_fp8, same, named, functools.partial(_rounding, named, how, len(tensors)))
    return [*outputs, newest.view(torch.float32), *shift]


def largest_fp8(
    tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, text: str, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the largest finite magnitudes by a launch of the kernel `largest_fp8`. Arguments: as of `rounding.largest_fp8`."""
    how, named = Rounding.from_text(text), _named(tensors, mean, seen)
    same = call_cache("largest_fp8", f"{text} {list(named)}", list(named.values()))
    with on(tensors[0].device):
        kept = _zeros(tensors, how.per or "tensor")
        named |= {"kept": kept}
        launch(kernels.largest_fp8, same, named, functools.partial(_looking, named, how, len(tensors)))
    return kept.view(torch.float32)


def mean_fp8(k: torch.Tensor, rotated: bool, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Launch `fp8_rounding.mean_fp8`."""
    given = {"x": k} if seen is None else {"x": k, "seen": seen}
    same = call_cache("mean_fp8", f"{rotated} {len(given)}", list(given.values()))
    batch, heads, length, head_dim = k.shape
    parts = triton.cdiv(length, _SUMS * _SUM_PART)
    with on(k.device):
        sums = torch.empty((batch, heads, parts, head_dim), dtype=torch.float32, device=k.device)
        mean = torch.empty((batch, heads, 1 + int(rotated), head_dim), dtype=torch.float32, device=k.device)
        launch(mean_kernels.sums_fp8, same, given | {"sums": sums}, functools.partial(_summing, k, parts, seen))
        launch(mean_kernels.mean_fp8, same, {"sums": sums, "mean": mean}, functools.partial(_adding, k, parts, rotated))
    return mean


def _zeros(tensors: Sequence[torch.Tensor], per: Per | None) -> torch.Tensor:
    """Allocate magnitudes as int32, the bits of float32."""
    size = 0 if per is None else sum(count(x, per) for x in tensors)
    return torch.zeros((size,), dtype=torch.int32, device=tensors[0].device)


def _named(
    tensors: Sequence[torch.Tensor], mean: torch.Tensor | None, seen: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    named = {f"x{i}": x for i, x in enumerate(tensors)}
    further = {"mean": mean, "seen": seen}
    return named | {name: x for name, x in further.items() if x is not None}


def _rounding(named: Named, how: Rounding, many: int) -> Arguments:
    is_known = how.each[0].magnitude is not None
    block = PART if "largest0" in named or is_known else how.block
    numbers: dict[str, Any] = {}
    for i in range(_MOST):
        each = how.each[i] if i < many else how.each[0]
        of_all = named.get(f"largest{i}")
        numbers[f"of_{i}"] = tuples_round.Numbers(
            **_tensor_numbers(named, i, block * (_RUN if each.rotated else 1)),
            **_strides(named, f"rounded{i}", "y"),
            **_strides(named, f"restored{i}", "r"),
            largest_b=0 if of_all is None else along(of_all, 0),
            largest_h=0 if of_all is None else along(of_all, 1),
            largest=each.largest,
            fits=each.fits,
            known=each.magnitude or 0.0,
        )
        numbers[f"EACH{i}"] = tuples_round.Each(
            **_widths(named, i),
            ROTATED=each.rotated,
            OF_KEYS=each.of_keys and "seen" in named,
            TURNED=each.turned,
            WHOLE=each.dtype == torch.int8,
        )
    numbers["shared"] = tuples_round.Shared(
        newest_b=int(how.per == "row"),
        newest_h=int(how.per in ("head", "row")),
        **_offsets("newest", named, how.per, many),
        seen_b=_seen_stride(named.get("seen")),
        group=_group(named, how),
    )
    numbers["HOW"] = tuples_round.RoundSwitches(
        BLOCK=block, PART=PART, MEAN_OF=_mean_of(how), SHIFT_OF=_shift_of(how), KNOWN=is_known, RUN=_RUN
    )
    names = [*_names("x", "largest", "rounded", "descale", "restored"), "mean", "seen", "shift", "newest"]
    return _arguments(named, names, numbers, _rounding_tile(named, how))


def _rounding_tile(named: Named, how: Rounding) -> Tile:
    warps, registers = _warps(_WARPS, named), _REGISTERS
    if _is_narrow(named, _NARROW):
        # With a rotation threads wait for each other more: 88 us with four warps, 91 with eight of 64 registers.
        warps, registers = (warps // 2, registers) if _has_rotation(how) else (warps, registers // 2)
    return Tile(queries=PART, keys=PART, warps=warps, stages=1, registers=registers)


def _has_rotation(how: Rounding) -> bool:
    return any(each.rotated for each in how.each)


def _looking(named: Named, how: Rounding, many: int) -> Arguments:
    per = how.per or "tensor"
    # H is made once a program.
    part, looks = (_LOOK_PART // 2, _LOOKS * 4) if _has_rotation(how) else (_LOOK_PART, _LOOKS)
    numbers: dict[str, Any] = {"HOW": tuples_round.LookSwitches(PARTS=looks, PART=part, MEAN_OF=_mean_of(how))}
    for i in range(_MOST):
        of_one = _tensor_numbers(named, i, looks * part)
        kept_b = of_one["heads"] if per == "row" else 0
        numbers[f"of_{i}"] = tuples_round.LookNumbers(**of_one, kept_b=kept_b, kept_h=int(per != "tensor"))
        numbers[f"EACH{i}"] = tuples_round.Each(
            **_widths(named, i),
            ROTATED=i < many and how.each[i].rotated,
            OF_KEYS=i < many and how.each[i].of_keys and "seen" in named,
        )
    numbers |= {**_offsets("kept", named, per, many), "seen_b": _seen_stride(named.get("seen"))}
    tile = Tile(queries=part, keys=part, warps=_warps(_LOOK_WARPS, named), stages=1)
    return _arguments(named, [*_names("x"), "mean", "seen", "kept"], numbers, tile)


def _summing(k: torch.Tensor, parts: int, seen: torch.Tensor | None = None) -> Arguments:
    batch, heads, length, head_dim = k.shape
    numbers = {"heads": heads, "length": length, "parts": parts, "PARTS": _SUMS, "PART": _SUM_PART}
    numbers |= {f"stride_{axis}": k.stride(at) for at, axis in enumerate("bhs")}
    numbers |= {"HEAD_DIM": head_dim, "WIDTH": triton.next_power_of_2(head_dim)}
    numbers["seen_b"] = _seen_stride(seen)
    tile = Tile(queries=_SUM_PART, keys=_SUM_PART, warps=_SUM_WARPS, stages=1)
    grid = (parts * heads * batch, 1, 1)
    tensors = {"X": "x", "Seen": None if seen is None else "seen", "Sums": "sums"}
    return Arguments(grid=grid, tensors=tensors, numbers=numbers, tile=tile)


def _adding(k: torch.Tensor, parts: int, rotated: bool) -> Arguments:
    batch, heads, length, head_dim = k.shape
    numbers = {"length": length, "parts": parts, "AT_ONCE": _SUMS_AT_ONCE, "ROTATED": rotated}
    numbers |= {"HEAD_DIM": head_dim, "WIDTH": triton.next_power_of_2(head_dim)}
    return Arguments(grid=(batch * heads, 1, 1), tensors={"Sums": "sums", "Mean": "mean"}, numbers=numbers)


def _warps(usual: int, named: Named) -> int:
    """Return twice as many warps for wider rows, so that each thread holds as much."""
    return usual if _is_narrow(named, _USUAL_WIDTH) else 2 * usual


def _is_narrow(named: Named, head_dim: int) -> bool:
    return all(x.shape[3] <= head_dim for name, x in named.items() if name.startswith("x"))


def _tensor_numbers(named: Named, i: int, block: int) -> dict[str, int]:
    """Return the arguments of one tensor that both kernels take. A missing tensor has no programs, and any other values."""
    x = named.get(f"x{i}", named["x0"])
    batch, heads, length, _ = x.shape
    programs = triton.cdiv(length, block) * heads * batch if f"x{i}" in named else 0
    return {"heads": heads, "length": length, "programs": programs} | _strides(named, f"x{i}", "x")


def _widths(named: Named, i: int) -> dict[str, int]:
    """Return the compile-time arguments of one tensor, as `_tensor_numbers`."""
    head_dim = named.get(f"x{i}", named["x0"]).shape[3]
    return {"HEAD_DIM": head_dim, "WIDTH": triton.next_power_of_2(head_dim)}


def _strides(named: Named, name: str, letter: str) -> dict[str, int]:
    x = named.get(name)
    return {f"stride_{letter}{axis}": 0 if x is None else x.stride(at) for at, axis in enumerate("bhs")}


def _seen_stride(seen: torch.Tensor | None) -> int:
    return 0 if seen is None else along(seen, 0)


def _offsets(name: str, named: Named, per: Per | None, many: int) -> dict[str, int]:
    sizes = [count(named[f"x{i}"], per) if per and i < many else 0 for i in range(_MOST)]
    return {f"{name}{i}": sum(sizes[:i]) for i in range(1, _MOST)}


def _mean_of(how: Rounding) -> int:
    return next((i for i, each in enumerate(how.each) if each.has_mean), -1)


def _shift_of(how: Rounding) -> int:
    return next((i for i, each in enumerate(how.each) if each.has_shift), -1)


def _group(named: Named, how: Rounding) -> int:
    """Return the number of heads with a shift that share one head of the mean."""
    i = _shift_of(how)
    return 1 if i < 0 else named[f"x{i}"].shape[1] // named["mean"].shape[1]


def _names(*names: str) -> list[str]:
    return [f"{name}{i}" for name in names for i in range(_MOST)]


def _arguments(named: Named, names: Sequence[str], numbers: dict[str, Any], tile: Tile) -> Arguments:
    grid = (sum(numbers[f"of_{i}"].programs for i in range(_MOST)), 1, 1)
    tensors = {name.capitalize(): name if name in named else None for name in names}
    return Arguments(grid=grid, tensors=tensors, numbers=numbers, tile=tile)
