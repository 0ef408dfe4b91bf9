"""options={"autotune": True}: the Triton kernels' tiles are measured while a model is compiled, and the fastest are kept on disk.

What is decided is spelled in the leaf op's text as always, so compile caches see it; with what is on disk the same tiles are chosen
again. How a kernel is timed is the business of `Measure` (measuring.py); nothing here needs a GPU or Triton.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attn_compiler.lowerings.base import Tile, Tiles, Tuned
from attn_compiler.lowerings.shared import parts as site_parts, tile_table
from attn_compiler.lowerings.triton.autotune_store import TileStore
from attn_compiler.lowerings.triton.candidates import Candidates, candidates
from attn_compiler.lowerings.triton.stand_ins import MeasuredSizes
from attn_compiler.options.cache import digest_of_tree, package_version
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import inductor as torch_inductor

log = logging.getLogger(__name__)

#: as people know them
_WORDS = {"forward": "forward", "grad_q": "dq", "grad_kv": "dk and dv"}


class Unfit(Exception):
    """A candidate can't run: it does not compile, or asks for more than the GPU has. Internal: it is left out, and logged."""


#: (kernel, tiles) -> microseconds of "forward", "grad_q" or "grad_kv". Raises Unfit.
Measure = Callable[[str, Tiles], float]
MeasureOf = Callable[[AttentionSpec, torch.device], Measure]
#: kernel -> tile -> microseconds
Times = dict[str, dict[Tile, float]]


def unmeasurable(target: Target) -> str | None:
    """Why no kernel can be measured on that machine; None if it can be."""
    if target.triton_interpreted:
        return "Triton interprets its kernels"
    if target.device != "cuda" or target.sm == 0:
        return f"there is no GPU behind {target.device}"
    return None


@dataclass(kw_only=True)
class Tuner:
    """Tiles of every spec of one compilation, each measured or read from disk once."""

    measure_of: MeasureOf
    gpu_name: Callable[[torch.device], str]
    store: TileStore
    found: dict[str, Tuned] = field(default_factory=dict)

    @staticmethod
    def here() -> Tuner:
        """On this machine's GPUs, kept in a folder of Inductor's cache."""
        folder = torch_inductor.cache_folder() / "attn_compiler" / "autotune"
        return Tuner(measure_of=_on_gpu, gpu_name=torch.cuda.get_device_name, store=TileStore(folder=folder))

    def unmeasurable(self, target: Target) -> str | None:
        """See `base.TileTuner`."""
        return unmeasurable(target)

    def of(self, spec: AttentionSpec, target: Target, device: torch.device) -> Tuned | None:
        """None where nothing can be measured."""
        if unmeasurable(target) is not None:
            return None
        given = candidates(spec, target)
        key = key_of(spec, target, self.gpu_name(device), given)
        if key not in self.found:
            measure = functools.partial(self.measure_of, spec, device)
            self.found[key] = tuned(spec, target, given, key=key, measure=measure, store=self.store)
        return self.found[key]


def _on_gpu(spec: AttentionSpec, device: torch.device) -> Measure:
    # It imports triton.
    from attn_compiler.lowerings.triton.measuring import Measurer

    return Measurer(spec, device)


def key_of(spec: AttentionSpec, target: Target, gpu: str, given: Candidates) -> str:
    """Differs whenever other tiles could be fastest: the spec, the machine, the candidates, the kernels and this package."""
    parts = {
        "spec": spec.to_text(),
        "target": target.digest(),
        "gpu": gpu,
        "candidates": dataclasses.asdict(given),
        "kernels": _kernels_digest(),
        "version": package_version(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _kernels_digest() -> str:
    """Of every family's kernels: they share some of their parts."""
    folders = sorted(Path(__file__).parents[1].rglob("kernels"))
    return "".join(digest_of_tree(folder) for folder in folders)


def tuned(
    spec: AttentionSpec,
    target: Target,
    given: Candidates,
    *,
    key: str,
    measure: Callable[[], Measure],
    store: TileStore,
) -> Tuned:
    """The fastest tiles of each kernel, from disk or measured now. measure: asked for only if there is something to measure."""
    table = tile_table.tiles(spec, target)
    known = _read(store.get(key), given)
    if known is not None:
        return _outcome(spec, table, known, source="from disk")
    search = _Search(spec, table, given, measure())
    with _progress(f"autotune: {_shape(spec)}", search.total) as advance:
        times = search.run(advance)
    if not times["forward"]:
        return Tuned(tiles=table, note=f"tiles are the table's: autotune could measure none ({search.failure})")
    store.put(key, _written(spec, times))
    return _outcome(spec, table, times, source="autotuned")


# ---- measuring ----------------------------------------------------------------------------------------------------


class _Search:
    """failure: why the last candidate that could not run did not."""

    def __init__(self, spec: AttentionSpec, table: Tiles, given: Candidates, measure: Measure) -> None:
        self._table = table
        self._given = given
        self._measure = measure
        self._plan = site_parts.of(spec)
        self._times: Times = {kernel: {} for kernel in _WORDS}
        self.failure = "no candidate"

    @property
    def total(self) -> int:
        """Candidates to measure."""
        gradients = len(self._given.grad_q) + len(self._given.grad_kv)
        return len(self._given.forward) + (gradients if self._plan.needs_grad else 0)

    def run(self, advance: Callable[[], None]) -> Times:
        """Microseconds of every candidate that ran. Gradients are measured after the forward that they need."""
        self._all("forward", self._given.forward, advance)
        if self._plan.needs_grad and self._times["forward"]:
            self._all("grad_q", self._given.grad_q, advance)
            self._all("grad_kv", self._given.grad_kv, advance)
        return self._times

    def _all(self, kernel: str, tiles: Iterable[Tile], advance: Callable[[], None]) -> None:
        for tile in tiles:
            try:
                self._times[kernel][tile] = self._measure(kernel, self._with(kernel, tile))
            except Unfit as error:
                self.failure = str(error)
                log.debug("autotune left out %s %s: %s", kernel, tile.words, error)
            advance()

    def _with(self, kernel: str, tile: Tile) -> Tiles:
        """The table's tiles but for this kernel's, over a forward that ran."""
        if kernel == "forward":
            return dataclasses.replace(self._table, forward=tile)
        forwards = self._times["forward"]
        if kernel == "grad_q" and self._plan.tiles:
            forwards = {f: time for f, time in forwards.items() if _visits_as(tile, f)}
            if not forwards:
                raise Unfit(f"no forward of {tile.queries}x{tile.keys} ran, whose lists it visits")
        tiles = dataclasses.replace(self._table, forward=_fastest(forwards))
        return (
            dataclasses.replace(tiles, grad_q=tile) if kernel == "grad_q" else dataclasses.replace(tiles, grad_kv=tile)
        )


def _visits_as(tile: Tile, other: Tile) -> bool:
    return (tile.queries, tile.keys) == (other.queries, other.keys)


def _fastest(times: Mapping[Tile, float]) -> Tile:
    """The first of equals, which is the table's."""
    return min(times, key=lambda tile: times[tile])


def winners(spec: AttentionSpec, table: Tiles, times: Times) -> Tiles:
    """The fastest of each kernel; of forward and dq together where both visit the same lists. The table's where none ran."""
    plan = site_parts.of(spec)
    forward = _fastest(times["forward"]) if times["forward"] else table.forward
    grad_q = _fastest(times["grad_q"]) if times["grad_q"] else table.grad_q
    grad_kv = _fastest(times["grad_kv"]) if times["grad_kv"] else table.grad_kv
    if plan.tiles and not plan.needs_grad:
        # No kernel runs with it, but tiles that contradict each other are never handed on.
        grad_q = dataclasses.replace(table.grad_q, queries=forward.queries, keys=forward.keys)
    elif plan.tiles:
        forward, grad_q = _fastest_pair(times) or (table.forward, table.grad_q)
    return Tiles(forward=forward, grad_q=grad_q, grad_kv=grad_kv)


def _fastest_pair(times: Times) -> tuple[Tile, Tile] | None:
    pairs = {
        (forward, grad_q): once + again
        for forward, once in times["forward"].items()
        for grad_q, again in times["grad_q"].items()
        if _visits_as(grad_q, forward)
    }
    return min(pairs, key=lambda pair: pairs[pair]) if pairs else None


# ---- on disk ------------------------------------------------------------------------------------------------------


def _written(spec: AttentionSpec, times: Times) -> dict[str, Any]:
    """measured_with is for people; what is read again is microseconds."""
    listed = {
        kernel: [{**dataclasses.asdict(tile), "microseconds": time} for tile, time in of_kernel.items()]
        for kernel, of_kernel in times.items()
    }
    return {"measured_with": MeasuredSizes.of(spec).words, "microseconds": listed}


def _read(value: Any, given: Candidates) -> Times | None:
    """Inverse of `_written`; None if it is something else."""
    try:
        times = {kernel: _read_kernel(value["microseconds"][kernel], getattr(given, kernel)) for kernel in _WORDS}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if value is not None:
            log.debug("ignored what was on disk: %r", error)
        return None
    return times if times["forward"] else None


def _read_kernel(listed: list[dict[str, Any]], given: tuple[Tile, ...]) -> dict[Tile, float]:
    measured = {Tile(**{name: n for name, n in one.items() if name != "microseconds"}): one for one in listed}
    if not measured.keys() <= set(given):
        raise ValueError("a tile that is no candidate")
    times = {tile: float(one["microseconds"]) for tile, one in measured.items()}
    if not all(time >= 0 for time in times.values()):
        raise ValueError("a time that is none")
    return times


# ---- words --------------------------------------------------------------------------------------------------------


def _outcome(spec: AttentionSpec, table: Tiles, times: Times, *, source: str) -> Tuned:
    chosen = winners(spec, table, times)
    said = ", ".join(
        _compared(kernel, getattr(chosen, kernel), getattr(table, kernel), times[kernel])
        for kernel in _WORDS
        if times[kernel]
    )
    assumed = MeasuredSizes.of(spec).stand_ins(spec)
    with_what = f"; measured with {', '.join(assumed)}" if assumed else ""
    return Tuned(tiles=chosen, note=f"tiles ({source}): {said}{with_what}")


def _compared(kernel: str, chosen: Tile, own: Tile, times: Mapping[Tile, float]) -> str:
    def timed(tile: Tile) -> str:
        return f"{times[tile]:.0f} µs" if tile in times else "not measurable"

    against = "as in the table" if chosen == own else f"the table's {own.words} {timed(own)}"
    return f"{_WORDS[kernel]} {chosen.words} {timed(chosen)} ({against})"


def _shape(spec: AttentionSpec) -> str:
    dims = f"{spec.head_dim_qk}" if spec.head_dim_qk == spec.head_dim_v else f"{spec.head_dim_qk}/{spec.head_dim_v}"
    return f"{MeasuredSizes.of(spec).words}, head dim {dims}, {spec.dtype}"


@contextlib.contextmanager
def _progress(words: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal's stderr, gone when done; elsewhere a line in the log."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    log.info("%s: measuring %d candidates", words, total)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(words, total=total)
        yield lambda: progress.advance(task)
