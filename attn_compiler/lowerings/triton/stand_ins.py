"""Tensors to measure the Triton kernels on: a site's own shape, strides and dtype, and operands that let through all that the band does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.lowerings.base import Tiles
from attn_compiler.lowerings.shared import parts, tiles as tile_lists
from attn_compiler.lowerings.shared.tiles import Masking
from attn_compiler.spec.added_scores import RelativeBias
from attn_compiler.spec.attention import AttentionSpec, Dim, TensorSpec

#: what a size that is not known stands for
UNKNOWN_SEQLEN = 4096
_UNKNOWN_BATCH = 4
_UNKNOWN_HEADS = 8
#: Longer sequences want no other tiles, and take long to measure.
MOST = 16384

#: bytes that the layout pass wants strides to be multiples of, as triton.py demands
_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSizes:
    """What a spec is measured with."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int

    @staticmethod
    def of(spec: AttentionSpec) -> MeasuredSizes:
        """The spec's own, but for those that are not known or so long that it makes no difference."""
        heads = [n for n in (spec.num_heads_q, spec.num_heads_kv) if isinstance(n, int)] or [_UNKNOWN_HEADS]
        return MeasuredSizes(
            batch=_known(spec.batch, _UNKNOWN_BATCH),
            heads_q=_known(spec.num_heads_q, heads[0]),
            heads_kv=_known(spec.num_heads_kv, heads[0]),
            seqlen_q=min(_known(spec.seqlen_q, UNKNOWN_SEQLEN), MOST),
            seqlen_kv=min(_known(spec.seqlen_kv, UNKNOWN_SEQLEN), MOST),
        )

    @property
    def words(self) -> str:
        """For people: "batch 4, 32/8 heads, 4096 queries, 4096 keys"."""
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        return f"batch {self.batch}, {heads} heads, {self.seqlen_q} queries, {self.seqlen_kv} keys"

    def stand_ins(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Which of them are not the spec's own: "4096 keys for s1"."""
        named = {
            f"batch {self.batch}": (self.batch, spec.batch),
            f"{self.heads_q} query heads": (self.heads_q, spec.num_heads_q),
            f"{self.heads_kv} key heads": (self.heads_kv, spec.num_heads_kv),
            f"{self.seqlen_q} queries": (self.seqlen_q, spec.seqlen_q),
            f"{self.seqlen_kv} keys": (self.seqlen_kv, spec.seqlen_kv),
        }
        return tuple(f"{words} for {own}" for words, (used, own) in named.items() if used != own)

    def broadcast(self, shape: tuple[Dim, ...]) -> tuple[int, int, int, int]:
        """The sizes along the axes of (B, Hq, Sq, Skv) that a tensor of this shape varies along, 1 along the others."""
        full = (self.batch, self.heads_q, self.seqlen_q, self.seqlen_kv)
        padded = (*(1,) * (4 - len(shape)), *shape)
        b, h, q, k = (1 if own == 1 else size for own, size in zip(padded, full, strict=True))
        return b, h, q, k


class StandIn:
    """q, k, v, upstream gradients and operands of one spec on a device. Raises what PyTorch raises out of memory."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._spec = spec
        self._sizes = sizes = MeasuredSizes.of(spec)
        self._device = device
        self._dtype = _dtype(spec.dtype)
        self._generator = torch.Generator(device).manual_seed(0)
        self._plan = parts.of(spec)
        if not isinstance(spec.head_dim_qk, int) or not isinstance(spec.head_dim_v, int):
            raise TypeError(f"why_not refuses unknown head dims, got {spec.head_dim_qk!r} and {spec.head_dim_v!r}")
        self.q = self._random(spec.q, (sizes.batch, sizes.heads_q, sizes.seqlen_q, spec.head_dim_qk))
        self.k = self._random(spec.k, (sizes.batch, sizes.heads_kv, sizes.seqlen_kv, spec.head_dim_qk))
        self.v = self._random(spec.v, (sizes.batch, sizes.heads_kv, sizes.seqlen_kv, spec.head_dim_v))
        self._lists: dict[Any, dict[str, torch.Tensor]] = {}

    def gradients(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Upstream gradients of both, laid out as they are."""
        return self._normal(out.shape).as_strided(out.shape, out.stride()), torch.zeros_like(lse)

    def operands(self, tiles: Tiles) -> list[torch.Tensor]:
        """In the order of `Plan.operands`; the lists are those for these tiles."""
        made = self._masking | self._scoring
        if self._plan.tiles:
            made |= self._lists_for(tiles)
        return [made[name] for name in self._plan.operands]

    def _random(self, described: TensorSpec, shape: tuple[int, int, int, int]) -> torch.Tensor:
        strides = strides_of(described, shape, self._dtype.itemsize)
        return self._normal((_extent(shape, strides),)).as_strided(shape, strides)

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, dtype=self._dtype, device=self._device)

    @functools.cached_property
    def _masking(self) -> dict[str, torch.Tensor]:
        plan, sizes = self._plan, self._sizes
        made: dict[str, torch.Tensor] = {}
        if plan.rows:
            ends = torch.tensor([0, sizes.seqlen_kv], dtype=torch.int32, device=self._device)
            made["rows"] = ends[:, None, None].expand(2, 1, sizes.seqlen_q).contiguous()
        if plan.keys:
            made["keys"] = torch.ones((1, sizes.seqlen_kv), dtype=torch.bool, device=self._device)
        if plan.documents:
            for name, length in (("documents_q", sizes.seqlen_q), ("documents_k", sizes.seqlen_kv)):
                made[name] = torch.zeros((1, length), dtype=torch.int32, device=self._device)
        if plan.mask:
            dense = self._spec.mask.dense or self._spec.score.bias
            shape = sizes.broadcast((1, 1, 1, 1) if dense is None else dense.shape)
            made["mask"] = torch.ones(shape, dtype=torch.bool, device=self._device)
        return made

    @functools.cached_property
    def _scoring(self) -> dict[str, torch.Tensor]:
        plan, sizes, heads = self._plan, self._sizes, self._sizes.heads_q
        made: dict[str, torch.Tensor] = {}
        if plan.bias:
            dense = self._spec.mask.dense or self._spec.score.bias
            shape, dtype = ((1, 1, 1, 1), self._spec.dtype) if dense is None else (dense.shape, dense.dtype)
            made["bias"] = torch.zeros(sizes.broadcast(shape), dtype=_dtype(dtype), device=self._device)
        if plan.distances:
            length = -(-(sizes.seqlen_q + sizes.seqlen_kv) // 8) * 8
            made["distances"] = torch.zeros((heads, 8, length), dtype=self._distances_dtype(), device=self._device)
        if plan.slopes:
            made["slopes"] = torch.zeros(heads, dtype=torch.float32, device=self._device)
        if plan.sinks:
            made["sinks"] = torch.zeros(heads, dtype=self._dtype, device=self._device)
        if plan.dropout:
            made["seed"] = torch.zeros(1, dtype=torch.int64, device=self._device)
        return made

    def _distances_dtype(self) -> torch.dtype:
        """A model's table has the dtype of q where it is handed on as it is."""
        proved = self._spec.score.proved
        alone = len(proved) == 1 and isinstance(proved[0], RelativeBias) and proved[0].weight == 1.0
        return self._dtype if alone else torch.float32

    def _lists_for(self, tiles: Tiles) -> Mapping[str, torch.Tensor]:
        """The same for every batch row and head, which keeps what they are made of small."""
        key = tuple((tile.queries, tile.keys) for tile in (tiles.forward, tiles.grad_kv))
        if key not in self._lists:
            self._lists[key] = self._made_lists(tiles)
        return self._lists[key]

    def _made_lists(self, tiles: Tiles) -> dict[str, torch.Tensor]:
        tensors: Any = self._masking
        mask = tensors.get("mask")
        masking = Masking(
            device=self._device,
            seqlen_q=self._sizes.seqlen_q,
            seqlen_kv=self._sizes.seqlen_kv,
            band=self._plan.band,
            rows=tensors.get("rows"),
            keys=tensors.get("keys"),
            documents=(tensors["documents_q"], tensors["documents_k"]) if self._plan.documents else None,
            mask=None if mask is None else mask[:1, :1],
        )
        emitter: Any = _Eager()
        found: dict[str, Any] = {"tiles": tile_lists.lists(emitter, masking, tiles, by_key=False)}
        if self._plan.needs_grad:
            found["tiles_by_key"] = tile_lists.lists(emitter, masking, tiles, by_key=True)
        return found


class _Eager:
    """An emitter whose nodes are tensors."""

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def value(self, node: Any) -> Any:
        return node

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        return make()


def strides_of(described: TensorSpec, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides that a kernel will see, in elements. What the layout pass copies is contiguous; an axis whose stride is not
    known lies outside of those whose is, and a batch outside of a sequence outside of heads."""
    given = described.strides
    if given[-1] != 1 or any(isinstance(s, int) and s * itemsize % _ALIGNMENT for s in given[:-1]):
        given = ("b", "h", shape[3], 1)
    strides = [stride if isinstance(stride, int) else 0 for stride in given]
    for axis in (1, 2, 0):
        if not isinstance(given[axis], int):
            strides[axis] = _packed(_extent(shape, tuple(strides)), itemsize)
    return tuple(strides)


def _packed(extent: int, itemsize: int) -> int:
    """The next stride, aligned if the elements before it do not end there anyway."""
    vector = _ALIGNMENT // itemsize
    return -(-extent // vector) * vector


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements of memory from the first to the last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0


def _known(dim: Dim, otherwise: int) -> int:
    return dim if isinstance(dim, int) else otherwise


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
