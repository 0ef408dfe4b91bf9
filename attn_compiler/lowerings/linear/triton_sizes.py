"""Sizes of a call of the kernels of linear attention, and how its tensors lie."""

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
#: columns of v that a program has: usually, and where heads of q and k are wider
_COLUMNS, _FEW = 32, 16
#: channels of k that a kernel of gradients has
_SHARE = 64
#: numbers in bfloat16 that one in float32 is taken as: where the result is in float32, and where it is in bfloat16
PARTS, FEWER = 3, 2


@dataclass(frozen=True, kw_only=True)
class LinearSizes:
    """batch, length, heads, groups (heads of q and k), dim_k, dim_v. parts: 0 where products are of float32.

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
    def of(q: Tensor, v: Tensor, *, is_half: bool) -> LinearSizes:
        """Of a call with q (B, S, Hk, K) and v (B, S, H, V). is_half: q, k and v are in bfloat16."""
        batch, length, heads, dim_v = v.shape
        dim_k = q.shape[3]
        width = wide(dim_k)
        return LinearSizes(
            batch=batch,
            length=length,
            heads=heads,
            groups=q.shape[2],
            dim_k=dim_k,
            dim_v=dim_v,
            parts=PARTS if is_half else 0,
            chunk=_CHUNK if width <= _USUAL else _SHORT,
            columns=min(_COLUMNS if width <= _USUAL else _FEW, wide(dim_v)),
        )

    @property
    def fewer(self) -> int:
        """As `parts`, of products that nothing has but what is in bfloat16."""
        return min(self.parts, FEWER)

    @property
    def chunks(self) -> int:
        """Of a sequence."""
        return -(-self.length // self.chunk)

    @property
    def rows(self) -> int:
        """Pairs of a batch row and a head of v."""
        return self.batch * self.heads

    @property
    def blocks(self) -> int:
        """Of columns of v."""
        return wide(self.dim_v) // self.columns

    @property
    def shares(self) -> int:
        """Of channels of k, each of a program of the kernels with most accumulators: more than 64 have no room in registers."""
        return max(wide(self.dim_k) // _SHARE, 1)

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """What kernels have of them."""
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
        """Room for tiles, the last two axes: in float32, or as parts in bfloat16 one after the other."""
        if not self.parts:
            return empty(shape, like)
        planes = (*shape[:-2], self.parts, *shape[-2:])
        return torch.empty(planes, dtype=torch.bfloat16, device=like.device)


def wide(dim: int) -> int:
    """A head's size as tiles have it."""
    return max(_LEAST, 1 << (dim - 1).bit_length())


def tile(sizes: LinearSizes, warps: int = 4, stages: int = 2) -> Tile:
    """How a kernel is compiled."""
    return Tile(queries=sizes.chunk, keys=sizes.columns, warps=warps, stages=stages)


def in_half(*tensors: Tensor) -> bool:
    """Whether products are of bfloat16."""
    return all(x.dtype == torch.bfloat16 for x in tensors)


def readable(x: Tensor, *, last: bool) -> Tensor:
    """With memory as kernels read it. last: numbers of the last axis lie side by side."""
    return x if not last or x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def strides(named: Named, axes: Mapping[str, str]) -> dict[str, int]:
    """`q_b`, `q_s` and the like: of each tensor, by the letters of its axes; 0 of what is absent."""
    return {
        f"{name}_{letter}": 0 if name not in named else named[name].stride(at)
        for name, letters in axes.items()
        for at, letter in enumerate(letters)
    }


def state_strides(form: LinearForm, state: Tensor | None, name: str) -> dict[str, int]:
    """As `strides`, of a state in the order of the function's own: (B, H, K, V), of the state space (B, H, V, K)."""
    letters = "bhvk" if form.recurrence == "ssd" else "bhkv"
    return {f"{name}_{x}": 0 if state is None else state.stride(at) for at, x in enumerate(letters)}


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """In float32."""
    return torch.empty(tuple(shape), dtype=torch.float32, device=like.device)
