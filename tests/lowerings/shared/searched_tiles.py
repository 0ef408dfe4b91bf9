"""What lists of tiles should hold: a search through every pair of every tile, for each part of a mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_compiler.lowerings.shared.ops.listing import SURPLUS
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Plan
from tests.lowerings import plan_math

#: of one list: the blocks that need the mask, and the run of those that don't
Blocks = tuple[list[int], list[int]]


@dataclass(frozen=True, kw_only=True)
class Mask:
    """have: its tensors by the names of `Plan`."""

    seqlen_q: int
    seqlen_kv: int
    band: Band | None
    have: Mapping[str, Tensor]

    @property
    def documents(self) -> tuple[Tensor, Tensor] | None:
        return (self.have["documents_q"], self.have["documents_k"]) if "documents_q" in self.have else None

    @property
    def parts(self) -> list[Plan]:
        """Each by itself, but for documents."""
        names = [name for name in self.have if not name.startswith("documents")]
        return [Plan(band=self.band), *(Plan(**{name: True}) for name in names)]

    def allowed(self, *plans: Plan) -> list[Tensor]:
        """bool (B, Hq, Sq, Skv) of each plan; of all parts together without one."""
        names = {name: True for name in self.have if not name.startswith("documents")}
        whole = Plan(band=self.band, documents=self.documents is not None, **names)
        found = [plan_math.allowed(plan, self.have, self.seqlen_q, self.seqlen_kv) for plan in (*plans, whole)]
        found = list(torch.broadcast_tensors(*found))
        return found[:-1] if plans else found


def longest_run(full: list[bool]) -> list[int]:
    """The first of the longest runs of blocks that are allowed in full."""
    runs: list[list[int]] = [[]]
    for i, is_full in enumerate(full):
        if is_full:
            runs[-1].append(i)
        else:
            runs.append([])
    return max(runs, key=len)


def searched(mask: Mask, tile: tuple[int, int], *, by_key: bool, exactly: bool = False) -> list[list[list[Blocks]]]:
    """For each batch row, head and block. exactly: a tile is visited if a pair of it is allowed; else if each part allows some pair."""
    (whole,), parts = mask.allowed(), mask.allowed(*mask.parts)
    counts = (-(-mask.seqlen_q // tile[0]), -(-mask.seqlen_kv // tile[1]))

    def state(b: int, h: int, i: int, j: int) -> tuple[bool, bool]:
        at = tuple(slice(n * step, (n + 1) * step) for n, step in zip((i, j), tile, strict=True))
        some = all(bool(x[b, h][at].any()) for x in ([whole] if exactly else parts))
        if mask.documents is not None and not exactly:
            queries, keys = (x.expand(len(whole), -1)[b, s] for x, s in zip(mask.documents, at, strict=True))
            some = some and bool(queries.min() <= keys.max()) and bool(keys.min() <= queries.max())
        return some, bool(whole[b, h][at].all()) and (j + 1) * tile[1] <= mask.seqlen_kv

    def blocks(b: int, h: int, n: int) -> Blocks:
        states = [state(b, h, *((m, n) if by_key else (n, m))) for m in range(counts[not by_key])]
        run = longest_run([full for _, full in states])
        return [m for m, (some, _) in enumerate(states) if some and m not in run], run

    batch, heads = whole.shape[:2]
    return [[[blocks(b, h, n) for n in range(counts[by_key])] for h in range(heads)] for b in range(batch)]


def read(listed: Tensor) -> list[list[list[Blocks]]]:
    """The same out of lists."""
    assert listed.dtype == torch.int32
    assert listed.is_contiguous()

    def blocks(row: list[int]) -> Blocks:
        count, first, end = row[:3]
        return row[3 : 3 + count], list(range(first, end))

    return [[[blocks(row) for row in head] for head in batch] for batch in listed[:, :, :-SURPLUS].tolist()]


def tensors(seqlen_q: int, seqlen_kv: int, names: tuple[str, ...], seed: int = 0) -> dict[str, Tensor]:
    """Random ones, with tiles of all three states."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    first = numbers(seqlen_kv, 2, seqlen_q)
    made = {
        "rows": torch.stack([first // 2, torch.minimum(first + 40, torch.tensor(seqlen_kv))]).int(),
        "keys": numbers(6, 2, 1 + seqlen_kv // 32).repeat_interleave(32, 1)[:, :seqlen_kv].contiguous() > 0,
        "documents_q": (torch.arange(seqlen_q) // 50)[None].int(),
        "documents_k": (torch.arange(seqlen_kv) // 50)[None].repeat(2, 1).int(),
        "mask": (numbers(40, 1, 3, seqlen_q, seqlen_kv) > 0) & (numbers(9, 1, 3, seqlen_q // 90 + 1, seqlen_kv // 90 + 1) > 3)
        .repeat_interleave(90, 2).repeat_interleave(90, 3)[:, :, :seqlen_q, :seqlen_kv],
    }  # fmt: skip
    if seqlen_q > 3:
        made["rows"][1, :, 1:3] = 0
    return {name: made[name] for name in names}
