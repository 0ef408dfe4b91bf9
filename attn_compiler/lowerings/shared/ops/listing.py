"""The op that makes lists of tiles, `attn_compiler::tile_lists`: the blocks of keys that a block of queries visits, or the other way round.

It evaluates each part of a mask by block. The band follows from arithmetic; intervals, keys and documents from their values for each query
or key; and a dense mask from `units`, which cover 32 × 32 pairs. So the work grows with the queries and keys, not with their pairs, and no
other node is needed. A tile is visited if each part by itself allows a pair of it. If no pair passes all parts, the visit is wasted, and
changes no result. The set of tiles that are allowed in full is exact.

It is an op of its own because Inductor takes 12 to 48 s to compile the sort that plain nodes need (32 to 128 blocks, an H200 machine, torch
2.11). On a GPU two small Triton kernels make the lists of any number of blocks (kernels/tile_lists.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.shared.ops.leaf_ops import late
from attn_compiler.torch_private.op_library import register_helper

#: numbers in front of a list: how many tiles need the mask, then first and end of the run of tiles that don't
HEAD = 3
#: numbers behind a list: the n-th list ends with the block whose list is the n-th shortest
TAIL = 1
#: lists behind the last block's, of undefined content: an axis that may be of size one would be guarded on
SURPLUS = 1
#: queries and keys of the pairs that one number of `units` covers. Tiles of a dense mask are multiples of it
UNIT = 32
#: numbers that the kernels store for each block of queries, and of keys
OF_QUERIES, OF_KEYS = 6, 4
#: bits of `units`: a pair is allowed; a pair is not
SOME, HOLES = 1, 2
#: an open side of the band: farther than any position, and sums with it fit into 32 bits
OPEN = 2**29


@dataclass(frozen=True, kw_only=True, slots=True)
class ListAsked:
    """One call of the op.

    rows: int32 (2, B|1, Sq). keys: bool (B|1, Skv). documents_q, documents_k: int32 (B|1, Sq), (B|1, Skv). These are contiguous.
    units: uint8 (B|1, Hq|1, ⌈Sq/32⌉|1, ⌈Skv/32⌉|1), bits as above, any strides; it may be longer.
    left, right: a query uses the keys from query - left to query + right. An open side has `OPEN`. Both lie within -OPEN to OPEN.
    from_end: positions are counted so that the last query meets the last key.
    queries, keys_of: queries and keys of a tile. Where a dense mask is read, powers of two and multiples of UNIT.
    by_key: the lists are those of blocks of keys.
    ordered: `TAIL` is filled. Otherwise its content is undefined.
    """

    rows: Tensor | None
    keys: Tensor | None
    documents_q: Tensor | None
    documents_k: Tensor | None
    units: Tensor | None
    seqlen_q: int
    seqlen_kv: int
    left: int
    right: int
    from_end: bool
    queries: int
    keys_of: int
    by_key: bool
    ordered: bool

    @staticmethod
    def from_arguments(*given: Any) -> ListAsked:
        """Collect the op's arguments, in order."""
        return ListAsked(**dict(zip(ListAsked.__slots__, given, strict=True)))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by name."""
        given = {
            "rows": self.rows,
            "keys": self.keys,
            "documents_q": self.documents_q,
            "documents_k": self.documents_k,
            "units": self.units,
        }
        return {name: x for name, x in given.items() if x is not None}

    @property
    def numbers(self) -> tuple[int | bool, ...]:
        """All arguments but the tensors."""
        band = (self.left, self.right, self.from_end)
        return self.seqlen_q, self.seqlen_kv, *band, self.queries, self.keys_of, self.by_key, self.ordered

    @property
    def band(self) -> tuple[int, int]:
        """Number of keys before and behind its own index that a query sees."""
        moved = self.seqlen_kv - self.seqlen_q if self.from_end else 0
        return self.left - moved, self.right + moved

    @property
    def blocks(self) -> tuple[int, int]:
        """Numbers of blocks of queries, and of keys."""
        return -(-self.seqlen_q // self.queries), -(-self.seqlen_kv // self.keys_of)

    def empty(self) -> Tensor:
        """Allocate the result: int32 (B|1, Hq|1, n + SURPLUS, m + HEAD + TAIL)."""
        batches = {"rows": 1, "keys": 0, "documents_q": 0, "documents_k": 0, "units": 0}
        batch = _larger([x.shape[batches[name]] for name, x in self.tensors.items()])
        heads = 1 if self.units is None else self.units.shape[1]
        rows, length = reversed(self.blocks) if self.by_key else self.blocks
        device = next(iter(self.tensors.values())).device
        return torch.empty((batch, heads, rows + SURPLUS, length + HEAD + TAIL), dtype=torch.int32, device=device)


def _larger(sizes: list[Any]) -> Any:
    """Return the size that sizes broadcast to. A symbolic one is not compared with 1: that would be a guard."""
    return next((size for size in sizes if not isinstance(size, int) or size != 1), 1)


def listed(*given: Any) -> Tensor:
    """Compute the op by PyTorch's ops, on any device."""
    asked = ListAsked.from_arguments(*given)
    some, holes = _states(asked)
    lists = asked.empty()
    some, holes = (torch.broadcast_to(x, (*lists.shape[:2], *asked.blocks)) for x in (some, holes))
    if asked.by_key:
        some, holes = some.transpose(2, 3), holes.transpose(2, 3)
    first, end, inside = _longest_run(some & ~holes)
    partial = some & ~inside
    # The sort is stable: blocks that need the mask come first, in their own order.
    order = torch.argsort((~partial).to(torch.uint8), dim=-1, stable=True)
    several = partial.sum(-1, keepdim=True)
    lists[:, :, : partial.shape[2], :-TAIL] = torch.cat([several, first, end, order], -1)
    if asked.ordered:
        lists[:, :, : partial.shape[2], -TAIL:] = torch.argsort(several + end - first, dim=-2, stable=True)
    return lists


def _longest_run(full: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return first and end of the longest run of blocks that are allowed in full, (…, 1), and which blocks are in it. Of equal runs the
    first counts.

    A run is visited without reading any list. Padding, windows and documents have but one.
    """
    at = torch.arange(full.shape[-1], device=full.device)
    if not full.shape[-1]:
        nowhere = torch.ones((*full.shape[:-1], 1), dtype=torch.int64, device=full.device)
        return nowhere, nowhere, full
    gaps = torch.where(full, -1, at).cummax(-1).values
    so_far = torch.where(full, at - gaps, 0)
    length = so_far.amax(-1, keepdim=True)
    end = so_far.argmax(-1, keepdim=True) + 1
    first = end - length
    return first, end, (at >= first) & (at < end)


# ---- what each part says of each tile, (B|1, Hq|1, nQ|1, nK|1) ----------------------------------------------------------------


def _states(asked: ListAsked) -> tuple[Tensor, Tensor]:
    """Return some: every part allows a pair of the tile; and holes: some part does not allow a pair, or there is no such key."""
    found = [_of_band(asked)]
    if asked.rows is not None:
        found.append(_of_rows(asked, asked.rows))
    if asked.keys is not None:
        by_block = _in_blocks(asked.keys, asked.seqlen_kv, asked.keys_of)[:, None, None]
        found.append((by_block.any(-1), ~by_block.all(-1)))
    if asked.documents_q is not None and asked.documents_k is not None:
        found.append(_of_documents(asked, asked.documents_q, asked.documents_k))
    if asked.units is not None:
        found.append(_of_units(asked, asked.units))
    some, holes = zip(*found, strict=True)
    return reduce(torch.logical_and, some), reduce(torch.logical_or, holes)


def _ends(asked: ListAsked) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return first and last position of each block of queries, (nQ, 1), and of keys, (nK,)."""
    device = next(iter(asked.tensors.values())).device

    def ends(blocks: int, length: int, seqlen: int) -> tuple[Tensor, Tensor]:
        first = torch.arange(blocks, device=device) * length
        return first, (first + length).clamp(max=seqlen) - 1

    queries, keys = asked.blocks
    first, last = ends(queries, asked.queries, asked.seqlen_q)
    return (first[:, None], last[:, None]), ends(keys, asked.keys_of, asked.seqlen_kv)


def _of_band(asked: ListAsked) -> tuple[Tensor, Tensor]:
    (first_q, last_q), (first_k, last_k) = _ends(asked)
    left, right = asked.band
    some = (last_k >= first_q - left) & (first_k <= last_q + right)
    outside = (first_k < last_q - left) | (last_k > first_q + right)
    return some[None, None], (outside | (first_k + asked.keys_of > asked.seqlen_kv))[None, None]


def _of_rows(asked: ListAsked, rows: Tensor) -> tuple[Tensor, Tensor]:
    _, (first_k, last_k) = _ends(asked)
    is_empty = rows[0] >= rows[1]
    lower = _in_blocks(rows[0].masked_fill(is_empty, OPEN), asked.seqlen_q, asked.queries)[:, None]
    upper = _in_blocks(rows[1].masked_fill(is_empty, -1), asked.seqlen_q, asked.queries)[:, None]
    some = (last_k >= lower.amin(-1, keepdim=True)) & (first_k < upper.amax(-1, keepdim=True))
    return some, (first_k < lower.amax(-1, keepdim=True)) | (last_k >= upper.amin(-1, keepdim=True))


def _of_documents(asked: ListAsked, documents_q: Tensor, documents_k: Tensor) -> tuple[Tensor, Tensor]:
    queries = _in_blocks(documents_q, asked.seqlen_q, asked.queries)[:, None, :, None]
    keys = _in_blocks(documents_k, asked.seqlen_kv, asked.keys_of)[:, None, None]
    least_q, most_q, least_k, most_k = queries.amin(-1), queries.amax(-1), keys.amin(-1), keys.amax(-1)
    some = (least_q <= most_k) & (least_k <= most_q)
    return some, (least_q != most_q) | (least_k != most_k) | (least_q != least_k)


def _of_units(asked: ListAsked, units: Tensor) -> tuple[Tensor, Tensor]:
    for axis, seqlen, length in ((2, asked.seqlen_q, asked.queries), (3, asked.seqlen_kv, asked.keys_of)):
        if units.shape[axis] > 1:
            at = _positions(-(-seqlen // UNIT), length // UNIT, units.device)
            units = units.movedim(axis, 0)[at].movedim((0, 1), (axis, -1))
        else:
            units = units.unsqueeze(-1)
    some, holes = (((units & bit) != 0).flatten(4).any(-1) for bit in (SOME, HOLES))
    return some, holes


def _in_blocks(x: Tensor, seqlen: int, length: int) -> Tensor:
    """Split (B|1, S) into (B|1, blocks, length). The last element fills the last block."""
    return x[:, _positions(seqlen, length, x.device)]


def _positions(size: int, length: int, device: torch.device) -> Tensor:
    """Return the positions of each block, int64 (blocks, length)."""
    blocks = -(-size // length)
    return torch.arange(blocks * length, device=device).clamp(max=size - 1).view(blocks, length)


register_helper(
    "tile_lists",
    "(Tensor? rows, Tensor? keys, Tensor? documents_q, Tensor? documents_k, Tensor? units, SymInt seqlen_q, SymInt seqlen_kv, "
    "int left, int right, bool from_end, int queries, int keys_of, bool by_key, bool ordered) -> Tensor",
    function=listed,
    fake=lambda *given: ListAsked.from_arguments(*given).empty(),
    on_gpu=late("shared.calls.listing_launch", "lists"),
    notes=True,
    exact_strides=True,
)
