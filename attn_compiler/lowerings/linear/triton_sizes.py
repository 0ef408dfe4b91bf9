"""Sizes of a call of the kernels of linear attention, and layouts of its tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.base import Tile
from attn_compiler.spec.linear import LinearForm

#: tensors of a call by name
Named = Mapping[str, Tensor]

#: least size of a product on tensor cores
_LEAST = 16
#: tokens of a chunk: usually, and where heads of q and k are wider than `_USUAL`
_CHUNK, _SHORT, _USUAL = 64, 32, 128
#: columns of v of a program: usually, and where heads of q and k are wider
_COLUMNS, _FEW = 64, 16
#: channels of k in a program of gradients
_SHARE = 64
#: bfloat16 parts of a float32 number by precision; and of those of results in bfloat16 at most
PARTS, FEWER = {"exact": 3, "fla": 1}, 2


@dataclass(frozen=True, kw_only=True)
class LinearSizes:
    """Sizes: batch, length, heads, groups (heads of q and k), dim_k, dim_v. parts: 0 where products are of float32.

    chunk: tokens at once. columns: of v at once.
    """

    batch: int
    length: int
    heads: int
    groups: int
    dim_k: int
    dim_v: int
    parts: int
    chunk: int
    columns: int

    @staticmethod
    def of(q: Tensor, v: Tensor, *, is_half: bool, precision: str = "exact", has_channels: bool = False) -> LinearSizes:
        """Return the sizes of a call with q (B, S, Hk, K) and v (B, S, H, V). is_half: they are in bfloat16. precision: of the form.
        has_channels: a forward in which each channel has a decay."""
        batch, length, heads, dim_v = v.shape
        dim_k = q.shape[3]
        width, parts = wide(dim_k), PARTS[precision] if is_half else 0
        # Two chunks of 64 tokens by 128 channels in three parts would not fit into shared memory.
        is_short = width > _USUAL or (has_channels and parts == PARTS["exact"])
        return LinearSizes(
            batch=batch,
            length=length,
            heads=heads,
            groups=q.shape[2],
            dim_k=dim_k,
            dim_v=dim_v,
            parts=parts,
            chunk=_SHORT if is_short else _CHUNK,
            columns=min(_COLUMNS if width <= _USUAL else _FEW, wide(dim_v)),
        )

    @property
    def fewer(self) -> int:
        """`parts` of products that contribute to bfloat16 results alone."""
        return min(self.parts, FEWER)

    @property
    def chunks(self) -> int:
        """Chunks of a sequence."""
        return -(-self.length // self.chunk)

    @property
    def rows(self) -> int:
        """Pairs of a batch row and a head of v."""
        return self.batch * self.heads

    @property
    def blocks(self) -> int:
        """Blocks of columns of v."""
        return wide(self.dim_v) // self.columns

    @property
    def warps(self) -> int:
        """Warps of a pass over states: each has 16 columns, so that what they compute goes from product to product in registers."""
        return max(self.columns // 16, 1) if wide(self.dim_k) <= _USUAL else 4

    @property
    def fewer_columns(self) -> int:
        """Columns of v that the kernels with most accumulators take at once: more would spill registers."""
        return max(self.columns // 2, _LEAST)

    @property
    def fills_memory(self) -> bool:
        """True if shared memory has no room for a second chunk, where each channel has a decay."""
        return self.parts > 1 and (self.chunk > _SHORT or wide(self.dim_k) > _USUAL)

    @property
    def registers(self) -> int | None:
        """Most registers, so that three programs of 4 warps share a processor. None: short chunks, and float32, gain by more."""
        return 168 if self.parts and self.chunk == _CHUNK else None

    @property
    def shares(self) -> int:
        """Shares of channels of k, one for each program of the kernels with most accumulators: more than 64 channels fill the registers."""
        return max(wide(self.dim_k) // _SHARE, 1)

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """Arguments of kernels."""
        return {
            "heads": self.heads,
            "group": self.heads // self.groups,
            "length": self.length,
            "chunks": self.chunks,
            "C": self.chunk,
            "DK": self.dim_k,
            "WK": wide(self.dim_k),
            "DV": self.dim_v,
            "WV": wide(self.dim_v),
            "BV": self.columns,
            "PARTS": self.parts,
            "PLANES": max(self.parts, 1),
            "OF_ROWS": self.fewer,
            "DS": wide(self.dim_k) // self.shares,
            "shares_g": self.batch * self.length * self.heads,
        }

    def in_parts(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Allocate tiles, the last two axes: in float32, or as parts in bfloat16 one after the other."""
        if not self.parts:
            return empty(shape, like)
        planes = (*shape[:-2], self.parts, *shape[-2:])
        return torch.empty(planes, dtype=torch.bfloat16, device=like.device)


def wide(dim: int) -> int:
    """Return a head's size rounded up for tiles."""
    return max(_LEAST, 1 << (dim - 1).bit_length())


def tile(sizes: LinearSizes, warps: int = 4, stages: int = 2, registers: int | None = None) -> Tile:
    """Return a kernel's compile options."""
    return Tile(queries=sizes.chunk, keys=sizes.columns, warps=warps, stages=stages, registers=registers)


def in_half(*tensors: Tensor) -> bool:
    """Return whether products are of bfloat16."""
    return all(x.dtype == torch.bfloat16 for x in tensors)


def readable(x: Tensor, *, last: bool) -> Tensor:
    """Return x, or a copy that kernels can read. last: the last axis has to be contiguous."""
    return x if not last or x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def strides(named: Named, axes: Mapping[str, str]) -> dict[str, int]:
    """Return `q_b`, `q_s` and the like: each tensor's strides, by the letters of its axes; 0 for absent tensors."""
    return {
        f"{name}_{letter}": 0 if name not in named else named[name].stride(at)
        for name, letters in axes.items()
        for at, letter in enumerate(letters)
    }


def state_strides(form: LinearForm, state: Tensor | None, name: str) -> dict[str, int]:
    """Return the strides of a state in the function's own order: (B, H, K, V), for the state space (B, H, V, K)."""
    letters = "bhvk" if form.recurrence == "ssd" else "bhkv"
    return {f"{name}_{x}": 0 if state is None else state.stride(at) for at, x in enumerate(letters)}


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocate float32."""
    return torch.empty(tuple(shape), dtype=torch.float32, device=like.device)
