"""Pieces of a call: runs of queries with the keys that they may see. A piece has a mask if its keys have gaps, or a band ends inside it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.spec.attention import AttentionSpec

#: queries of a piece that a band runs through
_BLOCK = 64
#: runs for each query of a batch row: with more, one call with a mask is cheaper than a call for each run
_MOST_RUNS = 1 / 8


def operand_names(spec: AttentionSpec) -> tuple[str, ...]:
    """Return the names of the operands in order, as `Plan` names them."""
    found = site_parts.parts(spec)
    has = {
        "rows": found.rows is not None,
        "keys": found.keys is not None or found.keys_given,
        "documents_q": found.documents is not None,
        "documents_k": found.documents is not None,
        "distances": bool(found.distances),
        "slopes": found.slopes is not None,
    }
    return tuple(name for name, here in has.items() if here)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Attention of some queries to some keys.

    first, end: batch rows, from .. to. count: how many pieces of the same lengths follow each other, in one batch row.
    q, k: the first query and key. num_q, num_k: of one piece. causal: query i sees keys up to i of the piece.
    mask: bool (num_q, num_k); None: all are seen.
    """

    first: int
    end: int
    q: int
    k: int
    num_q: int
    num_k: int
    count: int = 1
    causal: bool = False
    mask: torch.Tensor | None = None


#: operands that say which pairs are allowed
_MASKING = ("rows", "keys", "documents_q", "documents_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """Pieces, and the spec and operands that they were made from."""

    spec: AttentionSpec
    masking: dict[str, torch.Tensor]
    pieces: list[Piece]


#: pieces of the last calls, by spec and lengths: the layers of a model call with equal operands
_KEPT: dict[tuple[object, ...], _Kept] = {}
_MOST_KEPT = 16


def cut(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, operands: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Return the pieces of one call. A query that is in no piece has no key, and its output is 0.

    The cache compares the values of the operands, because compiled code writes to memory without changing a tensor's version.
    """
    masking = {name: operands[name] for name in _MASKING if name in operands}
    key = (id(spec), q.shape[0], q.shape[2], k.shape[2], *(x.dtype for x in masking.values()))
    kept = _KEPT.get(key)
    if (
        kept is not None
        and kept.spec is spec
        and all(torch.equal(x, kept.masking[name]) for name, x in masking.items())
    ):
        return kept.pieces
    pieces = _cut(spec, q, k, operands)
    if len(_KEPT) >= _MOST_KEPT:
        _KEPT.clear()
    _KEPT[key] = _Kept(spec=spec, masking={name: x.clone() for name, x in masking.items()}, pieces=pieces)
    return pieces


def _cut(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, operands: Mapping[str, torch.Tensor]) -> list[Piece]:
    of_call = _Call(
        rows=operands.get("rows"),
        keys=operands.get("keys"),
        documents_q=operands.get("documents_q"),
        documents_k=operands.get("documents_k"),
        band=site_parts.parts(spec).band,
        num_q=q.shape[2],
        num_k=k.shape[2],
    )
    found: list[Piece] = []
    known: dict[int, list[Piece]] = {}
    for batch in range(q.shape[0]):
        same = of_call.same_as(batch)
        if same not in known:
            known[same] = list(of_call.of_batch_row(same))
        found += [dataclasses.replace(piece, first=batch, end=batch + 1) for piece in known[same]]
    counts_distances = "distances" in operands or "slopes" in operands
    return _joined(found, counts_distances=counts_distances)


def _joined(pieces: list[Piece], *, counts_distances: bool) -> list[Piece]:
    """Join equal pieces of neighbouring batch rows, and pieces of the same lengths that follow each other. counts_distances: these must
    have as many queries as keys, so that k - q is the same in all of them."""
    by_place: dict[tuple[object, ...], Piece] = {}
    for piece in pieces:
        key = (piece.q, piece.k, piece.num_q, piece.num_k, piece.causal, id(piece.mask))
        last = by_place.get((*key, piece.first))
        if last is not None:
            del by_place[(*key, piece.first)]
            piece = dataclasses.replace(piece, first=last.first)
        by_place[(*key, piece.end)] = piece
    joined: list[Piece] = []
    for piece in sorted(by_place.values(), key=lambda piece: (piece.first, piece.q)):
        is_alike = not counts_distances or piece.num_q == piece.num_k
        if joined and is_alike and _follows(joined[-1], piece):
            joined[-1] = dataclasses.replace(joined[-1], count=joined[-1].count + 1)
        else:
            joined.append(piece)
    return joined


def _follows(last: Piece, piece: Piece) -> bool:
    return (
        last.mask is None
        and piece.mask is None
        and (last.first, last.end, last.num_q, last.num_k, last.causal)
        == (piece.first, piece.end, piece.num_q, piece.num_k, piece.causal)
        and last.end - last.first == 1
        and piece.q == last.q + last.count * last.num_q
        and piece.k == last.k + last.count * last.num_k
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Queries q .. end that may see the keys from `low` up to `high`, less those that other conditions leave out. band: of this run."""

    q: int
    end: int
    low: int
    high: int
    band: Band | None = None


@dataclass(kw_only=True)
class _Call:
    rows: torch.Tensor | None
    keys: torch.Tensor | None
    documents_q: torch.Tensor | None
    documents_k: torch.Tensor | None
    band: Band | None
    num_q: int
    num_k: int

    def __post_init__(self) -> None:
        self._masks: dict[tuple[int, int, int | None, int | None], torch.Tensor] = {}

    def same_as(self, batch: int) -> int:
        """Return a batch row with the same masks: 0 where nothing differs by batch row."""
        tensors = (self.rows[0] if self.rows is not None else None, self.keys, self.documents_q, self.documents_k)
        return batch if any(x is not None and x.shape[0] > 1 for x in tensors) else 0

    def of_batch_row(self, batch: int) -> Iterator[Piece]:
        has_gaps, runs = self._runs(batch)
        for run in runs:
            yield from self._pieces(batch, run, has_gaps)

    # ---- intervals -----------------------------------------------------------------------------------------------------

    def _runs(self, batch: int) -> tuple[bool, list[_Run]]:
        """Return whether tensors may leave out keys within the intervals, and the runs of queries with one interval."""
        low, high = torch.zeros(self.num_q, dtype=torch.int64), torch.full((self.num_q,), self.num_k)
        has_gaps = False
        if self.rows is not None:
            lower, upper = (_row(side, batch).to(torch.int64) for side in self.rows)
            low, high = torch.maximum(low, lower), torch.minimum(high, upper)
        if self.keys is not None:
            start, stop, has_gaps = _extent(_row(self.keys, batch))
            low, high = low.clamp(min=start), high.clamp(max=stop)
        if self.documents_q is not None and self.documents_k is not None:
            first, end, is_whole = _documents(_row(self.documents_q, batch), _row(self.documents_k, batch))
            low, high = torch.maximum(low, first), torch.minimum(high, end)
            has_gaps = has_gaps or not is_whole
        starts = _starts(low, high)
        ends = [*starts[1:], self.num_q]
        bounds = torch.stack((low[starts], high[starts])).tolist() if starts else [[], []]
        runs = zip(starts, ends, *bounds, strict=True)
        found = [_Run(q=q, end=end, low=a, high=b) for q, end, a, b in runs if a < b]
        is_cut_up = len(starts) > max(2, self.num_q * _MOST_RUNS)
        # Documents never share a call, whatever the order of their queries: a NaN of one document must not reach another.
        if is_cut_up and self.documents_q is None and found and not _are_apart(found):
            steps = _steps(low, high) if self.band is None else None
            if steps is not None:
                return has_gaps, steps
            return True, [_Run(q=0, end=self.num_q, low=int(low.min()), high=int(high.max()))]
        return has_gaps, found

    def _pieces(self, batch: int, run: _Run, has_gaps: bool) -> Iterator[Piece]:
        band = run.band or self.band
        if band is None:
            yield self._piece(batch, run, run.q, run.end, run.low, run.high, has_gaps=has_gaps)
            return
        shift = self.num_k - self.num_q if band.from_end else 0
        ahead = None if band.right is None else shift + band.right
        if not has_gaps and band.left is None and ahead is not None and run.low == run.q + ahead:
            high = min(run.high, run.end + ahead)
            yield Piece(
                first=batch, end=batch + 1, q=run.q, k=run.low, num_q=run.end - run.q, num_k=high - run.low, causal=True
            )
            return
        for q in range(run.q, run.end, _BLOCK):
            end = min(q + _BLOCK, run.end)
            low = run.low if band.left is None else max(run.low, q + shift - band.left)
            high = run.high if ahead is None else min(run.high, end + ahead)
            if low < high:
                yield self._piece(batch, run, q, end, low, high, has_gaps=has_gaps)

    # ---- masks ---------------------------------------------------------------------------------------------------------

    def _piece(self, batch: int, run: _Run, q: int, end: int, low: int, high: int, *, has_gaps: bool) -> Piece:
        mask = self._gaps(batch, q, end, low, high) if has_gaps else None
        within = self._within(run.band or self.band, q, end, low, high)
        mask = within if mask is None else mask if within is None else mask & within
        return Piece(first=batch, end=batch + 1, q=q, k=low, num_q=end - q, num_k=high - low, mask=mask)

    def _within(self, band: Band | None, q: int, end: int, low: int, high: int) -> torch.Tensor | None:
        """Return a bool mask where the band leaves out any pair. Pieces at the same place relative to the band share one tensor."""
        if band is None:
            return None
        shift = (self.num_k - self.num_q if band.from_end else 0) + q - low
        # Of the first query, counted from the first key.
        first = None if band.left is None else shift - band.left
        last = None if band.right is None else shift + band.right
        if (last is None or high - low - 1 <= last) and (first is None or first + end - q - 1 <= 0):
            return None
        key = (end - q, high - low, first, last)
        if key not in self._masks:
            ahead = torch.arange(high - low) - torch.arange(end - q)[:, None]
            allowed = torch.ones_like(ahead, dtype=torch.bool)
            if last is not None:
                allowed &= ahead <= last
            if first is not None:
                allowed &= ahead >= first
            self._masks[key] = allowed
        return self._masks[key]

    def _gaps(self, batch: int, q: int, end: int, low: int, high: int) -> torch.Tensor:
        """Return the pairs that the tensors allow, bool (queries, keys)."""
        allowed = torch.ones((end - q, high - low), dtype=torch.bool)
        if self.rows is not None:
            lower, upper = (_row(side, batch)[q:end, None] for side in self.rows)
            at = torch.arange(low, high)
            allowed &= (lower <= at) & (at < upper)
        if self.keys is not None:
            allowed &= _row(self.keys, batch)[low:high]
        if self.documents_q is not None and self.documents_k is not None:
            allowed &= _row(self.documents_q, batch)[q:end, None] == _row(self.documents_k, batch)[low:high]
        return allowed


def _are_apart(runs: list[_Run]) -> bool:
    """Return whether no key is in two runs, as in documents and packed rows. One call for all would spread NaN from run to run."""
    ordered = sorted(runs, key=lambda run: run.low)
    return all(run.high <= following.low for run, following in itertools.pairwise(ordered))


def _row(x: torch.Tensor, batch: int) -> torch.Tensor:
    return x[batch if x.shape[0] > 1 else 0]


def _starts(low: torch.Tensor, high: torch.Tensor) -> list[int]:
    """Return the queries whose interval of keys differs from the one before."""
    if not low.numel():
        return []
    changes = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    return [0, *(changes.nonzero().flatten() + 1).tolist()]


def _steps(low: torch.Tensor, high: torch.Tensor) -> list[_Run] | None:
    """Return runs in which both ends stay, or go on by one key a query, as in causal rows; None if there are too many."""
    by = torch.stack((low, high)).diff()
    steps = torch.where(((by == 0) | (by == 1)).all(0), by[0] * 2 + by[1], -1)
    changes = [*((steps[1:] != steps[:-1]).nonzero().flatten() + 1).tolist(), low.numel() - 1]
    if len(changes) + int((steps < 0).sum()) > max(4, low.numel() * _MOST_RUNS):
        return None
    lows, highs, kinds = low.tolist(), high.tolist(), steps.tolist()
    found, q, at = [], 0, 0
    while q < len(lows):
        while at < len(changes) - 1 and changes[at] <= q:
            at += 1
        kind = kinds[q] if q < len(kinds) else -1
        end = changes[at] + 1 if kind >= 0 else q + 1
        band = Band(left=q - lows[q] if kind & 2 else None, right=highs[q] - q - 1 if kind & 1 else None)
        run = _Run(q=q, end=end, low=lows[q], high=highs[end - 1], band=band if kind > 0 else None)
        found += [run] if run.low < run.high else []
        q = end
    return found


def _extent(keys: torch.Tensor) -> tuple[int, int, bool]:
    """Return the first key, the one after the last, and whether any in between is left out."""
    places = keys.nonzero().flatten()
    if not places.numel():
        return 0, 0, False
    first, last = int(places[0]), int(places[-1])
    return first, last + 1, places.numel() < last + 1 - first


def _documents(of_queries: torch.Tensor, of_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return for each query the first key of its document and the one after the last; and whether each document is in one piece."""
    changes = (of_keys[1:] != of_keys[:-1]).nonzero().flatten() + 1
    starts = torch.cat((changes.new_zeros(1), changes))
    ends = torch.cat((changes, changes.new_full((1,), of_keys.numel())))
    names, order = torch.sort(of_keys[starts], stable=True)
    found = torch.searchsorted(names, of_queries.contiguous()).clamp(max=names.numel() - 1)
    is_there = names[found] == of_queries
    if bool((names[1:] == names[:-1]).any()):
        whole = torch.full_like(of_queries, of_keys.numel(), dtype=torch.int64)
        return torch.zeros_like(whole), torch.where(is_there, whole, 0), False
    place = order[found]
    return starts[place], torch.where(is_there, ends[place], starts[place]), True
